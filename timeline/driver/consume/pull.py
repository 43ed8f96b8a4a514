"""Taking and settling messages by single calls, without a consumer. Each delivery has a receipt, which is a text.

A receipt may be settled by another process, later, at any broker. This suits request handlers and gateways. Programs
that keep running are better off with a consumer: it extends leases, and gets each message a little earlier.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from timeline.clock import Clock
from timeline.columns import Ragged, UInt64
from timeline.driver.batch import numbers_column
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DeliveredFrame, check_credit
from timeline.driver.consume.settler import ACK, SETTLE_BYTES, UNSEEN, SettleRequest, bury_of, release_of
from timeline.driver.delivery import Delivered
from timeline.driver.produce.request_queue import (
    FRAME_MESSAGES,
    BatchCall,
    Columns,
    RequestBatch,
    RequestQueue,
    UnaryCalls,
    calls_of,
    columns_at,
    cuts_of,
)
from timeline.driver.receipts import Receipts
from timeline.driver.times import Duration, When, duration_ms, shown
from timeline.driver.transport.channel import AttemptState, ClientContext, Deadline
from timeline.errors import Invalid, TimelineError
from timeline.model import (
    MAX_HOLDER_BYTES,
    MAX_ID_BYTES,
    MAX_TOPIC_CHARS,
    PAYLOAD_DAMAGED,
    PULL_PREFIX,
    Answers,
    Operation,
    Status,
    check_topic_name,
    payload_sums,
)
from timeline.wire import (
    AIM_BYTES,
    MAX_TAKE_BYTES,
    MAX_TAKE_MESSAGES,
    Deliver,
    Judgement,
    Ping,
    Pong,
    Settle,
    Settled,
    Take,
    decode_as,
    encode,
)
from timeline.wire.frames import PULL_MINOR
from timeline.wire.verify import minor_of

FORMAT = 1
_HEAD = struct.Struct("<BHBBQq")
"""Format, bytes of topic, of holder and of id, birth, version. Then topic, holder and id."""
_SUM = struct.Struct("<I")
MAX_TOPIC_BYTES = 4 * MAX_TOPIC_CHARS
MAX_TEXT = 4 * (_HEAD.size + MAX_TOPIC_BYTES + MAX_HOLDER_BYTES + MAX_ID_BYTES + _SUM.size) // 3 + 4
NO_RECEIPT = "this is no receipt: it is damaged or cut off. Give it as it came with the delivery (d.receipt)"


class LeaseToken(NamedTuple):
    """The lease of one delivery."""

    topic: str
    holder: str
    id: bytes
    birth: int
    version: int

    def receipt(self) -> str:
        """Return it as a receipt."""
        topic, holder = self.topic.encode(), self.holder.encode()
        head = _HEAD.pack(FORMAT, len(topic), len(holder), len(self.id), self.birth, self.version)
        body = head + topic + holder + self.id
        return base64.urlsafe_b64encode(body + _SUM.pack(zlib.crc32(body))).decode().rstrip("=")

    @classmethod
    def of(cls, receipt: object) -> LeaseToken:
        """Return the lease that a receipt names. Raise Invalid for anything else."""
        if not isinstance(receipt, str):
            raise Invalid(f"a receipt is a text, as d.receipt gives it, not {shown(receipt)}")
        text = receipt.strip()
        if not 0 < len(text) <= MAX_TEXT:
            raise Invalid(NO_RECEIPT)
        try:
            body = _verified(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
            form, *sizes, birth, version = _HEAD.unpack_from(body)
            if form != FORMAT or _HEAD.size + sum(sizes) != len(body):
                raise Invalid(NO_RECEIPT)
            topic, holder, id = _cut(body[_HEAD.size :], sizes)
            # A broker refuses a whole frame for what no lease has. The good receipts beside it would fail as well.
            if not _named(holder) or not _named(id) or version < 1:
                raise Invalid(NO_RECEIPT)
            return cls(check_topic_name(topic.decode()), holder.decode(), id, birth, version)
        except (binascii.Error, struct.error, ValueError, Invalid) as bad:
            raise Invalid(NO_RECEIPT) from bad


def _verified(data: bytes) -> bytes:
    """Return `data` without its checksum. Raise Invalid if that is wrong."""
    body, (checksum,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if checksum != zlib.crc32(body):
        raise Invalid(NO_RECEIPT)
    return body


def _named(text: bytes) -> bool:
    """Return whether `text` may be an id or a holder. Raise UnicodeDecodeError if it is not UTF-8."""
    return bool(text) and "\0" not in text.decode()


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Return the parts of `data` that have these sizes."""
    ends = list(accumulate(sizes))
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


log = logging.getLogger("timeline.driver")

MARGIN_MS = 2_500.0
"""How much sooner a broker ends its wait than the call would time out."""
WAIT_MS = 20_000
"""The longest wait of one call. A longer one is several, so that the broker's clock stays known."""
MEET_EVERY_MS = 30_000.0
CLOCKS_KEPT = 16
EARLY_MS = 20.0
"""The pause after a broker that ended its wait early. It is leaving, and another one is asked."""
TOO_OLD = (
    "the broker does not know take and settle: it speaks version 1.{minor} of the wire, and they need 1.{needed}. "
    "Upgrade the broker, or use a consumer: tl.consumer(topic)"
)
VERBS = ("ack", "extend", "release", "return", "bury")


@dataclass(frozen=True, slots=True)
class _PullHolder:
    """The holder of pulled deliveries, as far as their fields need one."""

    topic: str
    id: str
    clock: Clock

    def monotonic_ms(self) -> float:
        return self.clock.monotonic_ms()


class PulledDelivery(Delivered):
    """One message, leased until `lease_until`. Its `receipt` settles it. See `Timeline.take`."""

    __slots__ = ()

    @property
    def lease_left_ms(self) -> float:
        """How long its lease still lasts, in milliseconds, whatever the clocks show. Not above 0: it has ended."""
        return float(self._frame.end_ms[self._index]) - self._consumer.monotonic_ms()

    @property
    def receipt(self) -> str:
        """The text that settles it: `await tl.settle(d.receipt, "ack")`, in any process and at any broker."""
        columns = self._frame.columns
        token = LeaseToken(
            self._consumer.topic,
            columns.holder,
            columns.ids[self._index],
            int(columns.birth[self._index]),
            self.version,
        )
        return token.receipt()


class BrokersMet:
    """The brokers that Takes went to, and their clocks. A Take may wait for longer than a lease lasts, so its own times
    do not say when the lease ends. `met_ms`: when (monotonic) a broker was last asked for its time."""

    def __init__(self) -> None:
        self.met_ms = -math.inf
        self._clocks: dict[str, BrokerClock] = {}

    @property
    def met(self) -> bool:
        """Whether a broker has shown that it is new enough."""
        return self.met_ms > -math.inf

    def named(self, broker: str) -> BrokerClock:
        """Return the clock of the broker with this name."""
        return self._clock(f"{PULL_PREFIX}{broker}:")

    def clock_of(self, holder: str) -> BrokerClock:
        """Return the clock of the broker that has the leases of `holder`."""
        known = next((name for name in self._clocks if holder.startswith(name)), None)
        return self._clock(holder if known is None else known)

    def _clock(self, name: str) -> BrokerClock:
        made = self._clocks.pop(name, None) or BrokerClock()
        self._clocks[name] = made
        while len(self._clocks) > CLOCKS_KEPT:
            del self._clocks[next(iter(self._clocks))]
        return made


class SettleCalls(UnaryCalls):
    """The settles of one call, which may be of several topics and holders. `leases`: of its messages, by place. `ops`:
    their operation ids; None: random."""

    method = "Settle"

    def __init__(self, context: ClientContext, leases: list[LeaseToken | None], ops: UInt64 | None = None) -> None:
        self._leases, self._ops = leases, ops
        queue = RequestQueue(calls_of(Settle, Operation.ACK), context.clock, context.random, context.trouble)
        super().__init__(context, queue, "settling", "a settle")

    def frame(self, batch: RequestBatch, timeout_ms: int) -> bytes:
        assert batch.positions is not None
        lease = self._leases[int(batch.positions[0])]
        assert lease is not None
        return encode(Settle(request=0, topic=lease.topic, holder=lease.holder, **batch.columns))

    def answers(self, data: bytes) -> tuple[Answers, int]:
        return decode_as(data, Settled).answers, 0

    async def settle(self, asked: SettleRequest, timeout_ms: float, bad: Judgement) -> tuple[Answers, dict[int, int]]:
        """Settle all but `bad` ones. Return the answers, and the waits that brokers asked for."""
        many = BatchCall(self.queue, len(self._leases), timeout_ms, bad)
        groups: dict[tuple[str, str], list[int]] = {}
        for place, lease in enumerate(self._leases):
            if lease is not None:
                groups.setdefault((lease.topic, lease.holder), []).append(place)
        for places in groups.values():
            self._add(np.array(places, dtype=np.intp), asked, many)
        self.start()
        try:
            answers = await many.finished()
        finally:
            await self.stop()
        many.check_heard()
        return answers, many.waits_ms

    def _add(self, places: np.ndarray[Any, np.dtype[np.intp]], asked: SettleRequest, many: BatchCall) -> None:
        leases = [lease for place in places.tolist() if (lease := self._leases[place]) is not None]
        count = len(leases)
        columns: Columns = {
            "ids": Ragged.of([lease.id for lease in leases]),
            "birth": np.array([lease.birth for lease in leases], dtype=np.uint64),
            "version": np.array([lease.version for lease in leases], dtype=np.int64),
            "operation": np.full(count, asked.operation, dtype=np.uint8),
            "time_ms": np.full(count, asked.time_ms, dtype=np.int64),
            "flags": np.full(count, asked.flags, dtype=np.uint8),
            "op": self._operation_ids(places) if asked.repeatable else np.zeros(count, np.uint64),
            "reasons": Ragged.repeat(asked.reason, count) if asked.reason else None,
        }
        sizes = columns["ids"].sizes + SETTLE_BYTES + len(asked.reason)
        for part in cuts_of(sizes, AIM_BYTES, FRAME_MESSAGES):
            nbytes = int(sizes[part].sum())
            self.queue.add(RequestBatch(columns_at(columns, part), asked.operation, many, places[part], nbytes))

    def _operation_ids(self, places: np.ndarray[Any, np.dtype[np.intp]]) -> UInt64:
        return self._context.ids.numbers(len(places)) if self._ops is None else self._ops[places]


class Pulling:
    """The part of a client that takes and settles messages without a consumer. See `Timeline`."""

    _context: ClientContext
    _brokers: BrokersMet

    async def take(
        self,
        topic: str,
        max: int = 10,
        wait: Duration = "20s",
        *,
        lease: Duration | None = None,
        max_bytes: int = AIM_BYTES,
        timeout: Duration | None = None,
    ) -> list[PulledDelivery]:
        """Take up to `max` due messages without a consumer. Return as soon as there is one, or an empty list after
        `wait`.

            for d in await tl.take("departures", max=10, wait="20s"):
                await tl.settle(d.receipt, "ack")

        `lease`: the time for each message (default: the topic's). Nothing extends it by itself. `max_bytes`: the most
        bytes of payloads and headers; a larger message comes alone. `timeout`: how long to try beyond `wait` (default:
        the client's).

        If an answer is lost, its messages are delivered again when their leases end; then the call raises Unknown.
        Raise NotFound if there is no such topic, Invalid, Forbidden, or Unavailable.
        """
        self._context.check()
        wait_ms = duration_ms(wait, "wait")
        asked = Take(
            check_topic_name(topic),
            check_credit(max, "max", MAX_TAKE_MESSAGES),
            check_credit(max_bytes, "max_bytes", MAX_TAKE_BYTES),
            lease_ms=0 if lease is None else duration_ms(lease, "lease", least_ms=1),
        )
        clock = self._context.clock
        until_ms = clock.monotonic_ms() + wait_ms
        deadline = Deadline(clock, until_ms + self._context.patience_ms(timeout))
        while True:
            await self._meet(deadline)
            taken = await self._take(asked, until_ms, deadline)
            left_ms = until_ms - clock.monotonic_ms()
            if taken or left_ms <= 0:
                return taken
            await asyncio.sleep(min(EARLY_MS, left_ms) / 1000.0)

    async def _take(self, asked: Take, until_ms: float, deadline: Deadline) -> list[PulledDelivery]:
        clock, sent_ms = self._context.clock, 0.0

        def frame(timeout_ms: int) -> bytes:
            nonlocal sent_ms
            sent_ms = clock.monotonic_ms()
            in_time_ms = timeout_ms - min(MARGIN_MS, timeout_ms / 2)
            asked.wait_ms = int(max(0.0, min(until_ms - sent_ms, in_time_ms, WAIT_MS)))
            return encode(asked)

        data = await self._context.channel.unary("Take", frame, deadline, AttemptState(), writes=True)
        columns, arrived_ms = decode_as(data, Deliver), clock.monotonic_ms()
        broker = self._brokers.clock_of(columns.holder)
        broker.sent(sent_ms, columns.pushed_ms, arrived_ms)
        delivered = DeliveredFrame(columns, broker.monotonic_ms(0.0) + columns.lease_until_ms.astype(np.float64))
        holder, now_ms = _PullHolder(asked.topic, columns.holder, clock), clock.now()
        lasting = np.flatnonzero(~delivered.ended(arrived_ms)).tolist()
        taken = [PulledDelivery(holder, delivered, at, now_ms) for at in lasting]
        damaged = payload_sums(columns.payloads, columns.headers) != columns.payload_sum
        if bad := [d for d in taken if damaged[d._index]]:
            await self._bury_damaged(bad)
        return [d for d in taken if not damaged[d._index]]

    async def _bury_damaged(self, damaged: list[PulledDelivery]) -> None:
        log.error("%d messages of %s arrived damaged and are buried", len(damaged), damaged[0]._consumer.topic)
        try:
            await self.settle([d.receipt for d in damaged], "bury", reason=PAYLOAD_DAMAGED.decode())
        except TimelineError as trouble:
            log.warning("damaged messages were not buried, and come again when their leases end: %s", trouble)

    async def settle(
        self,
        receipts: str | Iterable[str],
        verb: str,
        *,
        in_: Duration | None = None,
        at: When | None = None,
        reason: str = "",
        lease: Duration | None = None,
        operation_ids: Sequence[int] | UInt64 | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Settle messages by their receipts, one or many. Return one answer each, in order.

            await tl.settle([d.receipt for d in taken], "ack")

        `verb` is one of these:

        - "ack": they are done, and are deleted.
        - "extend" with `lease=`: they stay leased for at least that long from now.
        - "release": they are due again at once, after `in_=`, or at the time `at=`.
        - "return": they are due again at once, and this delivery does not count. Nobody has worked on them.
        - "bury" with `reason=`: they become dead letters.

        A receipt that is damaged answers INVALID. One whose message was leased again since answers FENCED. Such a
        message fails alone (`.failed`, `.raise_failed()`). Raise only if the call itself failed.

        `operation_ids` (64 bits each, not 0): one for each receipt, by which a repeat of a release is recognised.
        Default: random.
        """
        self._context.check()
        asked = settle_request(verb, in_, at, reason, lease)
        listed = [receipts] if isinstance(receipts, str) else list(receipts)
        leases, bad = leases_of(listed)
        ops = None if operation_ids is None else numbers_column(operation_ids, len(listed), "operation_ids")
        patience_ms = self._context.patience_ms(timeout)
        if len(bad) < len(listed) and not self._brokers.met:
            await self._meet(Deadline.after(self._context.clock, patience_ms))
        answers, waits_ms = await SettleCalls(self._context, leases, ops).settle(asked, patience_ms, bad)
        ids = Ragged.of([b"" if lease is None else lease.id for lease in leases])
        return Receipts(ids, answers, waits_ms, asked.operation)

    async def _meet(self, deadline: Deadline) -> None:
        """Ask a broker for its time now and then, and before the first call for its version. An older broker is
        recognised by that, and not by its refusal: as the first answer of a connection, that could be another
        service's. Raise Invalid for an older broker."""
        clock, brokers = self._context.clock, self._brokers
        sent_ms = clock.monotonic_ms()
        if sent_ms < brokers.met_ms + MEET_EVERY_MS:
            return
        data = await self._context.channel.unary("Ping", encode(Ping(clock.now())), deadline)
        minor = minor_of(data)
        if minor < PULL_MINOR:
            raise Invalid(TOO_OLD.format(minor=minor, needed=PULL_MINOR))
        pong, brokers.met_ms = decode_as(data, Pong), clock.monotonic_ms()
        brokers.named(pong.broker).sent(sent_ms, int(pong.answered_ms), brokers.met_ms)


def leases_of(receipts: list[Any]) -> tuple[list[LeaseToken | None], Judgement]:
    """Return the leases of receipts by place, and which receipts are damaged. Those have no lease."""
    leases: list[LeaseToken | None] = []
    bad = Judgement()
    for place, receipt in enumerate(receipts):
        try:
            leases.append(LeaseToken.of(receipt))
        except Invalid as damaged:
            leases.append(None)
            bad[place] = Status.INVALID, damaged.reason
    return leases, bad


def settle_request(
    verb: str, in_: Duration | None, at: When | None, reason: str, lease: Duration | None
) -> SettleRequest:
    """Return the request of a settle in words. Raise Invalid for an argument that the verb does not take."""
    if verb not in VERBS:
        raise Invalid(f"verb must be one of {', '.join(VERBS)}, not {shown(verb)}")
    given = {"in_": in_, "at": at, "reason": reason or None, "lease": lease}
    takes = {"release": ("in_", "at", "reason"), "bury": ("reason",), "extend": ("lease",)}.get(verb, ())
    for name, value in given.items():
        if value is not None and name not in takes:
            allowed = ", ".join(f"{one}=" for one in takes) or "nothing"
            raise Invalid(f"{verb} does not take {name}=. It takes {allowed}")
    if verb == "release":
        return release_of(in_, at, reason)
    if verb == "bury":
        return bury_of(reason)
    if verb == "ack":
        return ACK
    if verb == "return":
        return UNSEEN
    if lease is None:
        raise Invalid('extend needs lease=, the time from now: lease="30s"')
    return SettleRequest(Operation.EXTEND, duration_ms(lease, "lease", least_ms=1))
