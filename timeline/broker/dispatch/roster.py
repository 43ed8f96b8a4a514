"""The roster: a topic's connected consumers, their credit and health, and their outboxes."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.drift import Offset
from timeline.broker.limits import Limits
from timeline.model import MAX_BATCH, LeavingReason
from timeline.storage_plugins.contract import Grant


class ConsumerHealth(StrEnum):
    """HEALTHY gets messages. SILENT: no heartbeat. STALLED: does not take what is pushed. SET_ASIDE: its leases ran out
    one after another, so it gets none for a while. GONE: its stream is over."""

    HEALTHY = "healthy"
    SILENT = "silent"
    STALLED = "stalled"
    SET_ASIDE = "set_aside"
    GONE = "gone"


class Outboxes:
    """The outboxes of all consumers of a broker, in bytes, shared between hosts. `freed` is called when there is room
    for a host that found none.

    If several hosts fill the bound, none may have more of it than is left. A host with nothing still gets something up
    to half the bound beyond it, so that hosts that do not read hold up no other.
    """

    def __init__(self, limit_bytes: int, freed: Callable[[], None]) -> None:
        self._limit_bytes, self._freed = limit_bytes, freed
        self._of_host: dict[str, int] = {}
        self._refused: set[str] = set()
        """Hosts that found no room."""
        self.bytes = 0

    def admits(self, host: str) -> bool:
        """Return whether more may be leased for consumers of `host`."""
        found = self._has_room(host)
        if not found:
            self._refused.add(host)
        return found

    def _has_room(self, host: str) -> bool:
        left, mine = self._limit_bytes - self.bytes, self._of_host.get(host, 0)
        if not mine:
            return left + self._limit_bytes // 2 > 0
        return left > 0 and (len(self._of_host) == 1 or mine <= left)

    def add(self, host: str, bytes_: int) -> None:
        """Add bytes of a consumer of `host`; negative: remove them."""
        self.bytes += bytes_
        self._of_host[host] = self._of_host.get(host, 0) + bytes_
        if not self._of_host[host]:
            del self._of_host[host]
        if bytes_ < 0 and self._refused and any(map(self._has_room, self._refused)):
            self._refused.clear()
            self._freed()


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """Queued for a consumer behind all that it still gets: it has to leave."""

    reason: LeavingReason
    text: str


SUPERSEDED = (
    "another session connected under this consumer id: give each consumer an id of its own (a forked child, too), or "
    "none, and they share the messages"
)


@dataclass(frozen=True, slots=True)
class JoinedConsumer:
    """A consumer that connected: its id, its session, the name of its token, and when, in ms UTC. 0: it is a broker's
    own."""

    id: bytes
    session: int
    bearer: str
    joined_ms: int

    def supersedes(self, other: JoinedConsumer) -> bool:
        """Return whether it is a later session of the same consumer, with the same token."""
        same = self.id == other.id and self.bearer == other.bearer and self.session != other.session
        later = (self.joined_ms, self.session) > (other.joined_ms, other.session)
        return same and later and other.joined_ms > 0


@dataclass(slots=True)
class ConnectedConsumer:
    """One consumer's stream on this broker.

    `credit_*` is its room now. `room_*` is all its room: the most it ever had, or the size that it named. If they are
    equal, nothing is in flight.

    `wake` wakes its dealer. `trickled` does so for less credit than a step. `changed` tells its roster that it has
    credit, has none any more, or is set aside.
    """

    id: bytes
    session: int
    lease_ms: int
    credit_messages: int
    credit_bytes: int
    limits: Limits
    heartbeat_ms: int
    heard_ms: float
    wake: Callable[[], None]
    outboxes: Outboxes
    bearer: str = ""
    """The name of the token of its stream. While it is here, no other token may use its id."""
    host: str = ""
    """Where its stream comes from."""
    joined_ms: int = 0
    """When it connected, in ms UTC."""
    trickled: Callable[[], None] = lambda: None
    changed: Callable[[ConnectedConsumer], None] = lambda _: None
    outbox: deque[object] = field(default_factory=deque)
    outbox_bytes: int = 0
    room_bytes: int = 0
    room_messages: int = 0
    sending_since_ms: float | None = None
    lapses: int = 0
    _lapse_until_ms: int = 0
    set_asides: int = 0
    set_aside_until_ms: float = 0.0
    dealing: bool = False
    """Whether it may be dealt to, because its earlier leases were looked up."""
    leaving: LeaveNotice | None = None
    clock: Offset | None = None
    """How far its own clock is ahead of ours, as it says."""
    gone: bool = False
    """Whether nothing may be pushed to it any more."""
    finished: bool = False
    _loans: deque[int] = field(default_factory=deque)
    """The numbers of the open loans, the oldest first."""
    _last_loan: int = 0
    loan_revoked: bool = False
    """Whether a loan was taken back since its dealer's last round began, which may have spent it."""
    _withheld: deque[tuple[int, LeasedBatch]] = field(default_factory=deque)
    """Batches that were dealt while loans were open, each with the newest of them."""
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.room_messages = max(self.credit_messages, min(self.room_messages, self.credit_messages + MAX_BATCH))
        self.room_bytes = max(self.room_bytes, self.credit_bytes)

    @property
    def joined(self) -> JoinedConsumer:
        """Itself, as other brokers are told of it."""
        return JoinedConsumer(self.id, self.session, self.bearer, self.joined_ms)

    @property
    def lone_grant(self) -> Grant:
        """A grant for one message, however large a round is."""
        return Grant(self.id, min(1, max(0, self.credit_messages)), self.lease_ms, max(0, self.credit_bytes), self.idle)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight. A message larger than its credit in bytes may then be sent alone."""
        return self.credit_messages >= self.room_messages and self.credit_bytes >= self.room_bytes

    @property
    def over_credit(self) -> bool:
        """Whether more was dealt to it than it has credit, since a loan was taken back."""
        return self.loan_revoked and (self.credit_messages < 0 or self.credit_bytes < 0)

    @property
    def has_step(self) -> bool:
        """Whether its free credit, in messages and bytes, is worth a round."""
        share = self.limits.step_share
        messages = min(self.limits.step_messages, self.room_messages // share)
        return self.credit_messages >= messages and (self.credit_bytes >= self.room_bytes // share or self.idle)

    @property
    def credit_ahead(self) -> int:
        """How many messages may be leased for it before they are due."""
        return self.credit_messages

    @property
    def in_flight(self) -> int:
        """Messages in its hands or on their way."""
        return max(0, self.room_messages - self.credit_messages)

    def open_credit(self, now_ms: float) -> int:
        """Return how many messages may be dealt to it at monotonic `now_ms`."""
        return max(0, self.credit_messages) if self.health(now_ms) is ConsumerHealth.HEALTHY else 0

    def health(self, now_ms: float) -> ConsumerHealth:
        """Return its health at monotonic `now_ms`."""
        if self.gone:
            return ConsumerHealth.GONE
        if now_ms - self.heard_ms > self.heartbeat_ms * self.limits.heartbeats_missed:
            return ConsumerHealth.SILENT
        if self.sending_since_ms is not None and now_ms - self.sending_since_ms > self.limits.heartbeat_ms:
            return ConsumerHealth.STALLED
        return ConsumerHealth.SET_ASIDE if now_ms < self.set_aside_until_ms else ConsumerHealth.HEALTHY

    def deal(self) -> None:
        """Start to deal to it."""
        self.dealing = True
        self.changed(self)
        self.wake()

    def heard(self, now_ms: float) -> None:
        """Note that a frame of it arrived."""
        before = self.health(now_ms)
        self.heard_ms = now_ms
        if before is ConsumerHealth.SILENT:
            self.wake()

    def sent(self, now_ms: float) -> None:
        """Note that it took what was sent."""
        before = self.health(now_ms)
        self.sending_since_ms = None
        if before is ConsumerHealth.STALLED:
            self.wake()

    def add_credit(self, messages: int, bytes_: int) -> None:
        """Give it more credit."""
        had = self.credit_messages > 0
        self.credit_messages += messages
        self.credit_bytes += bytes_
        if had != (self.credit_messages > 0):
            self.changed(self)
        self.room_messages = max(self.room_messages, self.credit_messages)
        self.room_bytes = max(self.room_bytes, self.credit_bytes)
        if messages or bytes_:
            if self.has_step:
                self.wake()
            else:
                self.trickled()

    def resize(self, room_messages: int, more_messages: int) -> None:
        """Take over the room that the consumer names. `more_messages`: the credit that it gets with it. The room grows
        by no more than that, so that a consumer cannot claim to have messages in flight."""
        self.room_messages = min(room_messages, self.room_messages + more_messages)

    def spend(self, messages: int, bytes_: int) -> None:
        """Use credit for what was leased for it."""
        had = self.credit_messages > 0
        self.credit_messages -= messages
        self.credit_bytes -= bytes_
        if had != (self.credit_messages > 0):
            self.changed(self)

    def lend(self, messages: int, bytes_: int) -> int:
        """Give it the credit of a settle that is not answered yet. Batches dealt meanwhile wait for that answer.
        Return the loan's number, for `repay`."""
        self._last_loan += 1
        self._loans.append(self._last_loan)
        self.add_credit(messages, bytes_)
        return self._last_loan

    def repay(self, loan: int, messages: int, bytes_: int, counts: bool) -> list[LeasedBatch]:
        """End a loan once the settle's answer is queued. If the settle does not count, take the credit back. Return the
        batches that were dealt for credit that it has not."""
        self._loans.remove(loan)
        if not counts:
            self.loan_revoked = True
            self.spend(messages, bytes_)
        too_many = []
        while self._withheld and self.over_credit:
            _, batch = self._withheld.pop()
            too_many.append(batch)
            self._weigh(-batch.frame_bytes)
            self.refund(batch)
        while self._withheld and not (self._loans and self._loans[0] <= self._withheld[0][0]):
            self.outbox.append(self._withheld.popleft()[1])
            self._ready.set()
        return too_many

    def refund(self, batch: LeasedBatch) -> None:
        """Return the credit of a batch that does not reach it."""
        self.add_credit(len(batch), int(batch.sizes.sum()))

    def push(self, item: object) -> None:
        """Queue a frame, a batch or a notice. The stream makes frames of these when their turn comes."""
        if isinstance(item, LeasedBatch):
            self._weigh(item.frame_bytes)
            if self._loans:
                self._withheld.append((self._loans[-1], item))
                return
        self.outbox.append(item)
        self._ready.set()

    def _weigh(self, bytes_: int) -> None:
        was_full = self.outbox_bytes >= self.limits.outbox_bytes
        self.outbox_bytes += bytes_
        self.outboxes.add(self.host, bytes_)
        if was_full and self.outbox_bytes < self.limits.outbox_bytes:
            self._room.set()
            self.wake()

    async def next(self) -> object | None:
        """Return what to send next. None: it is finished, and all that was queued is sent.

        Small batches of one round that wait behind each other go together. A frame for each would make them later
        still.
        """
        while not self.outbox:
            if self.finished:
                return None
            self._ready.clear()
            await self._ready.wait()
        item = self.outbox.popleft()
        if isinstance(item, LeasedBatch):
            item = self._joined(item)
        if len(self.outbox) < self.limits.answers_waiting:
            self._room.set()
        return item

    def _joined(self, first: LeasedBatch) -> LeasedBatch:
        """Return `first`, taken from the outbox, with the batches behind it that go with it."""
        batches, messages, bytes_ = [first], len(first), first.frame_bytes
        while (
            self.outbox and isinstance(behind := self.outbox[0], LeasedBatch) and behind.joins(first, messages, bytes_)
        ):
            batches.append(behind)
            self.outbox.popleft()
            messages, bytes_ = messages + len(behind), bytes_ + behind.frame_bytes
        self._weigh(-bytes_)
        return LeasedBatch.concat(batches)

    async def room(self) -> None:
        """Return when few of its answers wait. A peer that does not read is not read, gone or not."""
        while len(self.outbox) >= self.limits.answers_waiting:
            self._room.clear()
            await self._room.wait()

    async def room_for_batches(self) -> None:
        """Return when its outbox may take more batches."""
        while self.outbox_bytes >= self.limits.outbox_bytes and not self.gone:
            self._room.clear()
            await self._room.wait()

    def withdraw(self) -> list[LeasedBatch]:
        """Push nothing more to it. Return the batches that were not sent. Its answers stay queued."""
        unsent = [item for item in self.outbox if isinstance(item, LeasedBatch)]
        unsent += [batch for _, batch in self._withheld]
        self._withheld.clear()
        kept = [item for item in self.outbox if not isinstance(item, LeasedBatch)]
        self.outbox.clear()
        self.outbox.extend(kept)
        self.gone = True
        self._weigh(-self.outbox_bytes)
        self._room.set()
        return unsent

    def superseded(self) -> list[LeasedBatch]:
        """Ask it to leave, because another session has its id. Return the batches that were not sent."""
        return self.leave(LeavingReason.SUPERSEDED, SUPERSEDED)

    def leave(self, reason: LeavingReason, text: str) -> list[LeasedBatch]:
        """Ask it to leave. Return the batches that were not sent."""
        unsent = self.withdraw()
        if self.leaving is None:
            self.leaving = LeaveNotice(reason, text)
            self.push(self.leaving)
        return unsent

    def finish(self) -> None:
        """End its stream once all that is queued is sent."""
        self.finished = True
        self._ready.set()

    def lapsed(self, ended_ms: int, wall_ms: int, now_ms: float) -> None:
        """Note that a round at `wall_ms` found leases of it run out, the last one at `ended_ms`. After too many moments
        in a row it is set aside, longer each time."""
        if ended_ms <= self._lapse_until_ms:
            return
        self._lapse_until_ms = wall_ms + min(self.lease_ms, self.limits.heartbeat_ms)
        self.lapses += 1
        if self.lapses >= self.limits.lapses_tolerated:
            wait_ms = min(self.limits.set_aside_cap_ms, self.limits.set_aside_first_ms << min(self.set_asides, 16))
            self.set_aside_until_ms = now_ms + wait_ms
            self.set_asides += 1
            self.changed(self)
            self.lapses = self.limits.lapses_tolerated - 1  # on probation: one more lapse sets it aside again

    def settled(self) -> None:
        """It settled something: it is well."""
        self.lapses = self.set_asides = 0
        if self.set_aside_until_ms:
            self.set_aside_until_ms = 0.0
            self.wake()


@dataclass(slots=True, eq=False)
class OwnConsumer(ConnectedConsumer):
    """A consumer in this process. It is healthy while it is there. A lease that ran out says that the store or one
    caller was slow. The others must not wait for that."""

    def health(self, now_ms: float) -> ConsumerHealth:
        """Return its health."""
        return ConsumerHealth.GONE if self.gone else ConsumerHealth.HEALTHY

    def lapsed(self, ended_ms: int, wall_ms: int, now_ms: float) -> None:
        """Do nothing."""


class Roster:
    """A topic's consumers, by id. A round's work does not grow with those that have no credit."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.consumers: dict[bytes, ConnectedConsumer] = {}
        self._last: bytes = b""
        self._credited: list[bytes] = []
        """The ids of those that may be dealt to and have credit, in order."""
        self._aside: set[bytes] = set()
        self.well: set[bytes] = set()
        """The ids of those that are dealt to and were healthy when last looked at."""

    def join(self, consumer: ConnectedConsumer) -> ConnectedConsumer | None:
        """Add it. Return the one that had its id, which is now off the roster."""
        before = self.consumers.pop(consumer.id, None)
        self.consumers[consumer.id] = consumer
        consumer.changed = self._changed
        self._changed(consumer)
        return before

    def leave(self, consumer: ConnectedConsumer) -> None:
        """Take it off, unless another has its place already."""
        if self.knows(consumer):
            del self.consumers[consumer.id]
            self._aside.discard(consumer.id)
            self.well.discard(consumer.id)
            self._credit(consumer.id, False)

    def recount(
        self, some: Iterable[bytes], now_ms: float, count: Callable[[ConnectedConsumer, ConsumerHealth], None]
    ) -> bool:
        """Look at the health of the consumers with `some` ids, at monotonic `now_ms`, and `count` each. Return whether
        others are healthy than before."""
        changed = False
        for id in some:
            one = self.consumers.get(id)
            if one is None:
                continue
            health = one.health(now_ms)
            count(one, health)
            if (one.dealing and health is ConsumerHealth.HEALTHY) != (id in self.well):
                self.well ^= {id}
                changed = True
        return changed

    def knows(self, consumer: ConnectedConsumer) -> bool:
        """Return whether it is here, and no other has its id by now."""
        return self.consumers.get(consumer.id) is consumer

    def _changed(self, consumer: ConnectedConsumer) -> None:
        if self.knows(consumer):
            self._credit(consumer.id, consumer.dealing and consumer.credit_messages > 0)
            if consumer.set_aside_until_ms:
                self._aside.add(consumer.id)

    def _credit(self, id: bytes, has: bool) -> None:
        at = bisect_left(self._credited, id)
        known = at < len(self._credited) and self._credited[at] == id
        if has and not known:
            self._credited.insert(at, id)
        elif known and not has:
            del self._credited[at]

    def _able(self, now_ms: float) -> Iterator[ConnectedConsumer]:
        """Yield healthy consumers with credit, in dealing order: first the one after the last that was dealt to."""
        count, turn = len(self._credited), bisect_right(self._credited, self._last)
        for step in range(count):
            consumer = self.consumers[self._credited[(turn + step) % count]]
            if (
                (consumer.credit_bytes > 0 or consumer.idle)
                and consumer.outbox_bytes < self.limits.outbox_bytes
                and consumer.health(now_ms) is ConsumerHealth.HEALTHY
                and consumer.outboxes.admits(consumer.host)
            ):
                yield consumer

    def ready(self, now_ms: float) -> list[ConnectedConsumer]:
        """Return the consumers of a round that begins now, in dealing order, as many as a round may serve. The next
        round goes on behind them."""
        return list(islice(self._able(now_ms), self.limits.consumers_dealt))

    def any_ready(self, now_ms: float) -> bool:
        """Return whether there is one."""
        return next(self._able(now_ms), None) is not None

    def widest(self, now_ms: float) -> ConnectedConsumer | None:
        """Return the one that may have the largest message: one with nothing in flight, or else the most credit in
        bytes. None: there is none."""
        return max(self._able(now_ms), key=lambda consumer: (consumer.idle, consumer.credit_bytes), default=None)

    def any_ahead(self, now_ms: float) -> bool:
        """Return whether one of them may be leased messages ahead."""
        return any(consumer.credit_ahead > 0 for consumer in self._able(now_ms))

    def any_step(self, now_ms: float) -> bool:
        """Return whether one of them has a step of credit."""
        return any(consumer.has_step for consumer in self._able(now_ms))

    def anybody(self, now_ms: float) -> bool:
        """Return whether a consumer lacks only credit, or only does not read."""
        there = (ConsumerHealth.HEALTHY, ConsumerHealth.STALLED)
        return any(consumer.health(now_ms) in there for consumer in self.consumers.values())

    def dealt_last(self, consumer: ConnectedConsumer) -> None:
        """Remember whose turn it was."""
        self._last = consumer.id

    def recovers_at_ms(self, now_ms: float) -> float | None:
        """Return when the next suspended consumer may get messages again. None: none is suspended."""
        times = {id: self.consumers[id].set_aside_until_ms for id in self._aside}
        self._aside = {id for id, until_ms in times.items() if until_ms > now_ms}
        return min((times[id] for id in self._aside), default=None)


def grants_for(consumers: list[ConnectedConsumer], limits: Limits, most: int, early: bool = False) -> list[Grant]:
    """Return grants for one round: each consumer's credit, at most `most` and `limits.lease_bytes` over all. `early`:
    the round begins ahead of a due time.

    There is one grant for each of the first consumers. Those behind them have none this time.
    """
    share_bytes = max(1, limits.lease_bytes // max(1, len(consumers)))
    credit = [consumer.credit_ahead if early else consumer.credit_messages for consumer in consumers]
    counts = _shares(credit, min(most, limits.lease_messages))
    return [
        Grant(
            holder=consumer.id,
            count=count,
            lease_ms=consumer.lease_ms,
            max_bytes=max(0, min(consumer.credit_bytes, share_bytes)),
            alone=consumer.idle,
        )
        for consumer, count in zip(consumers, counts, strict=True)
        if count
    ]


def _shares(credit: list[int], most: int) -> list[int]:
    """Split `most` messages as evenly as credit allows, at least one each. If there are fewer, to the first."""
    if most < len(credit):
        return [1] * most + [0] * (len(credit) - most)
    shares = [0] * len(credit)
    order = sorted(range(len(credit)), key=lambda at: (credit[at], -at))
    for rank, at in enumerate(order):
        shares[at] = max(0, min(credit[at], most // (len(order) - rank)))
        most -= shares[at]
    return shares
