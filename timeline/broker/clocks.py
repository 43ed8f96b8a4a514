"""The clocks that this broker compares its own with: other brokers', the store's, and its clients'.

`measure` asks them once a second. `look`, four times a second, follows the wall clock as far as they permit. It finds
out whether this broker may go by its own clock, by the rules of `drift.py`. Clients report their offsets with their
heartbeats. Their clocks are shown and warned of, and count for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from timeline.broker.cluster import BrokerPeers
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.broker.drift import (
    ClockJudgement,
    ClockSamples,
    Comparison,
    Offset,
    Trust,
    Witness,
    compare,
    find,
    judge_step,
    sample,
)
from timeline.broker.fairness import CooperativePace
from timeline.broker.runtime import Runtime
from timeline.clock import WARN_MS, StepVerdict
from timeline.storage_plugins.contract import Store, StoreError
from timeline.sync import Member
from timeline.wire import Ping, Pong, TransportError, WireError, decode_as, encode

log = logging.getLogger("timeline.broker")
REMEDY = "set the clocks by chrony or ntpd"


class PeerClock:
    """Another broker's clock. `step_ms`: a jump of its wall clock that it has not followed yet."""

    def __init__(self) -> None:
        self.window = ClockSamples()
        self.step_ms = 0.0


class Clocks:
    """All clocks that one broker knows. `members`: brokers of the cluster. `consumers`: those connected here. `changed`
    is called when `quarantined` has changed."""

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        members: Callable[[], Sequence[Member]],
        consumers: Callable[[], Iterable[ConnectedConsumer]],
        peers: BrokerPeers,
        changed: Callable[[], None],
    ) -> None:
        self._clock, self._limits, self._metrics = runtime.clock, runtime.limits, runtime.metrics
        self._name, self._store, self._changed = peers.name, store, changed
        self._members, self._consumers, self._peers = members, consumers, peers
        self._others: dict[str, PeerClock] = {}
        self._of_store = ClockSamples()
        self._asking: asyncio.Task[None] | None = None
        self._conscience = ClockJudgement(self._clock.monotonic_ms())
        self._verdict: StepVerdict | None = None
        self._shown: set[tuple[str, str]] = set()
        self._adrift = False
        self.quarantined = ""
        """Why this broker does not go by its own clock. Empty: it does."""

    @property
    def trust(self) -> Trust:
        """Whether it goes by its own clock."""
        return self._conscience.trust

    # ── asking ──

    async def measure(self) -> None:
        """Ask all other clocks once, at the same time. Late answers are left out."""
        asked = self._asked()
        if not self.trust.quarantined:  # what spoke against us is kept, and fades, until it is over
            there = {member.name for member in asked}
            self._others = {name: other for name, other in self._others.items() if name in there}
        await asyncio.gather(self._ask_store(), *(self._ask(member) for member in asked))
        self.weigh()
        await self._show()

    def _asked(self) -> list[Member]:
        """Return the members whose clocks are measured. Of very many, these are the next ones by name, round about."""
        others = sorted((member for member in self._members() if member.name != self._name), key=lambda one: one.name)
        turned = sorted(others, key=lambda one: one.name < self._name)
        return turned[: self._limits.clocks_measured]

    async def _ask(self, member: Member) -> None:
        peer, clock = self._peers.peer(member), self._clock
        if peer is None:
            return
        sent_ms = clock.monotonic_ms()
        try:
            data = await peer.channel.unary("Ping", encode(Ping(clock.now())), self._limits.clock_answer_ms / 1000.0)
            pong = decode_as(data, Pong)
        except (TransportError, WireError) as trouble:
            log.debug("the clock of broker %s cannot be read: %s", member.name, trouble.reason)
            return
        measured = sample(sent_ms, pong.received_ms, pong.answered_ms, clock.monotonic_ms())
        if measured is not None and pong.broker == member.name:  # no other one that has its address by now
            other = self._others.setdefault(member.name, PeerClock())
            other.window.take(measured)
            other.step_ms = pong.step_ms

    async def _ask_store(self) -> None:
        """Ask the store for its own clock, if it has one. A slow store is asked again once it has answered."""
        if not self._store.capabilities.own_clock:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._read_store(), name="reading the store's clock")
        await asyncio.wait({self._asking}, timeout=self._limits.clock_answer_ms / 1000.0)

    async def _read_store(self) -> None:
        clock, outcome = self._clock, "OK"
        sent_ms = clock.monotonic_ms()
        try:
            store_ms = await self._store.clock_ms()
        except StoreError as trouble:
            store_ms, outcome = None, trouble.code
        except Exception:
            store_ms, outcome = None, "UNKNOWN"
            log.exception("the storage plugin raised what its contract does not allow, in clock_ms")
        arrived_ms = clock.monotonic_ms()
        self._metrics.store_call("clock_ms", outcome, arrived_ms - sent_ms)
        measured = None if store_ms is None else sample(sent_ms, store_ms, store_ms, arrived_ms)
        if measured is not None:
            self._of_store.take(measured)

    # ── judging ──

    def look(self) -> None:
        """Read the wall clock, and follow it as far as other clocks permit."""
        self._clock.observe(self.judge)
        if self._verdict is not None and not self._clock.step_ms:
            self._verdict = None
            log.info("the wall clock and ours agree again")
        self.weigh()

    def judge(self, step_ms: float) -> StepVerdict:
        """Return what other clocks say of a jump of our wall clock. Log it when that changes."""
        mono_ms = self._clock.monotonic_ms()
        offset = self._fresh(self._of_store)
        store = None if offset is None else Witness(offset, self._of_store.steady(mono_ms))
        peers = [
            Witness(offset, able=not other.step_ms)
            for other in self._others.values()
            if (offset := self._fresh(other.window)) is not None
        ]
        verdict = judge_step(step_ms, store, peers)
        if verdict is not self._verdict:
            self._verdict = verdict
            log.warning(f"the wall clock jumped by {step_ms / 1000.0:+,.3f} s: {SAID[verdict]}")
        return verdict

    def weigh(self) -> None:
        """Find out whether our clock can be trusted."""
        compared = self.compared()
        if not self._conscience.meet(find(compared), self._clock.monotonic_ms()):
            return
        said, trust = _sentence(compared), self.trust
        if trust is Trust.QUARANTINED and not self.quarantined:
            self.quarantined = f"quarantined: {said}; it leases nothing until that is fixed ({REMEDY}): use another one"
            log.error(self.quarantined)
            self._changed()
        elif not trust.quarantined and self.quarantined:
            self.quarantined = ""
            log.warning("quarantined no more: %s", said)
            self._changed()
        elif trust is Trust.WARNED:
            log.warning("%s: %s", said, REMEDY)
        else:
            log.info("clock %s: %s", trust, said)
        self._metrics.gauge("timeline_quarantined", 1 if self.quarantined else 0)

    def compared(self) -> Comparison:
        """Compare our clock with all that are known now. In quarantine, older measurements count until they have faded:
        no broker comes back because no other is left to contradict it."""
        windows = [self._of_store, *(other.window for other in self._others.values())]
        read = self._last if self.trust.quarantined else self._fresh
        return compare([offset for window in windows if (offset := read(window)) is not None])

    def _fresh(self, window: ClockSamples) -> Offset | None:
        return self._last(window) if window.fresh(self._clock.monotonic_ms()) else None

    def _last(self, window: ClockSamples) -> Offset | None:
        mono_ms = self._clock.monotonic_ms()
        return window.offset(mono_ms, self._clock.now_at(mono_ms))

    # ── showing ──

    async def _show(self) -> None:
        """Set the gauges, and remove those of clocks that are gone."""
        compared = self.compared()
        metrics = self._metrics
        metrics.gauge("timeline_clocks_compared", compared.clocks)
        metrics.gauge("timeline_clock_median_offset_seconds", compared.median.ahead_ms / 1000.0)
        metrics.gauge("timeline_clock_median_error_seconds", compared.median.error_ms / 1000.0)
        metrics.gauge("timeline_quarantined", 1 if self.quarantined else 0)
        found = {("broker", name): self._fresh(other.window) for name, other in self._others.items()}
        found["store", ""] = self._fresh(self._of_store)
        found["client", ""] = await self._show_clients()
        known = {key: offset for key, offset in found.items() if offset is not None}
        for kind, peer in self._shown - known.keys():
            metrics.forget("timeline_clock_offset_seconds", kind, peer)
            metrics.forget("timeline_clock_error_seconds", kind, peer)
        self._shown = set(known)
        for (kind, peer), offset in known.items():
            metrics.gauge("timeline_clock_offset_seconds", offset.ahead_ms / 1000.0, kind, peer)
            metrics.gauge("timeline_clock_error_seconds", offset.error_ms / 1000.0, kind, peer)

    async def _show_clients(self) -> Offset | None:
        """Count the consumers whose clocks are off, and warn once there are some. Return the worst offset."""
        off, pace = 0, CooperativePace()
        worst: tuple[Offset, bytes] | None = None
        for some in pace.some(self._consumers()):
            told = [(one.clock, one.id) for one in some if one.clock is not None and not one.gone]
            off += sum(offset.sure_ms >= WARN_MS for offset, _ in told)
            worst = max([worst, *told] if worst else told, key=_by_offset, default=None)
            await pace.did(len(some))
        self._metrics.gauge("timeline_clients_adrift", off)
        if worst is None:
            self._adrift = False
            return None
        if bool(off) is not self._adrift:
            self._adrift = bool(off)
            if off:
                offset, id = worst
                log.warning(
                    "consumer %r has a clock %s ours, the worst of %d: %s", id.decode(), _off(offset), off, REMEDY
                )
            else:
                log.info("the clocks of all consumers are within %d ms", WARN_MS)
        return worst[0]


SAID = {
    StepVerdict.CONFIRMED: "other clocks confirm it, it is followed",
    StepVerdict.DENIED: "other clocks are with ours, it is not followed",
    StepVerdict.OPEN: "no other clock can say, it is followed if it stands for a minute",
}


def _by_offset(told: tuple[Offset, bytes]) -> tuple[float, float]:
    offset, _ = told
    return offset.sure_ms, abs(offset.ahead_ms)


def _off(offset: Offset) -> str:
    """Return in words how far another clock is from ours."""
    direction = "ahead of" if offset.ahead_ms >= 0 else "behind"
    return f"{abs(offset.ahead_ms) / 1000.0:,.3f} s (give or take {offset.error_ms / 1000.0:,.3f} s) {direction}"


def _sentence(compared: Comparison) -> str:
    """Return in words how our clock stands among others."""
    if compared.clocks < 2:
        return "there is no other clock to compare this broker's with"
    median = compared.median
    ours = Offset.about(-median.ahead_ms, median.error_ms)
    among = "the only other one" if compared.clocks == 2 else f"the median of {compared.clocks} clocks"
    return f"this broker's clock is {_off(ours)} {among}"
