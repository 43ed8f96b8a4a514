"""Circuits of a host and of one receiver there: after failures in a row one opens, nothing is sent, then one tries."""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 5
MOST_OF_HOST = 2_000
"""Requests of all topics that one host may have at once. A topic takes at most as many as it leaves to the others."""
FIRST_MS = 1_000.0
CAP_MS = 60_000.0


class Circuit:
    """Closed: requests go. Open: none goes until a time. Half-open: one goes, and its answer decides.

    Times are monotonic milliseconds. `random`: returns 0 to 1. Each wait is up to a fifth longer, so that gateways do
    not try at one time. `hearers`: called at the end of a probe, for which all topics of the host wait.
    """

    def __init__(self, random: Callable[[], float], failures: int = FAILURES) -> None:
        self._random, self._most = random, failures
        self._failed = self._opened = 0
        self._until_ms = 0.0
        self._probing = False
        self.hearers: set[Callable[[], None]] = set()

    @property
    def open(self) -> bool:
        """Whether the last requests failed, and no later one succeeded."""
        return self._opened > 0

    def holds_up(self, now_ms: float) -> bool:
        """Return whether it is open, and something wants to go. When nothing has tried for a while, nothing does."""
        return self.open and (self._probing or now_ms < self._until_ms + CAP_MS)

    def wait_ms(self, now_ms: float) -> float:
        """Return how long nothing may be sent. 0: something may. Infinite: not before the probe's answer."""
        if not self.open:
            return 0.0
        return float("inf") if self._probing else max(0.0, self._until_ms - now_ms)

    def admit(self, now_ms: float) -> bool:
        """Return whether a request may go now. If the circuit is open, it is the probe: tell its end."""
        if self.wait_ms(now_ms) > 0:
            return False
        self._probing = self.open
        return True

    def succeeded(self) -> None:
        """Note an answer of a receiver that works, whatever it said about the message."""
        self._failed = self._opened = 0
        self._end_probe()

    def failed(self, now_ms: float) -> None:
        """Note a request without an answer, or with one that says that the receiver does not work."""
        self._failed += 1
        if self.open and not self._probing:
            return  # sent before it opened
        if self._probing or self._failed >= self._most:
            wait_ms = min(CAP_MS, FIRST_MS * 2.0 ** min(self._opened, 16))
            self._until_ms = now_ms + wait_ms * (1.0 + self._random() / 5.0)
            self._opened += 1
            self._end_probe()

    def given_up(self) -> None:
        """Note a request that ended without saying anything about the receiver. Another one may try."""
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probing:
            self._probing = False
            self.tell()

    def tell(self) -> None:
        """Let the topics look again whether they may send."""
        for hear in self.hearers:
            hear()


class Host:
    """What all topics whose webhooks go to one host share: a circuit, and a bound of requests under way."""

    def __init__(self, circuit: Circuit) -> None:
        self.circuit = circuit
        self.under_way = 0

    @property
    def free(self) -> int:
        """How many more requests may go to it now."""
        return max(0, MOST_OF_HOST - self.under_way)


class Receiver:
    """What stands between a topic and its receiver: the host, which other topics share, and a circuit of its own. A
    host that takes no connection concerns all of them. No answer, or one of 5xx, concerns this topic alone.

    Each request that is admitted ends by one of `answered`, `unanswered` and `given_up`.
    """

    def __init__(self, host: Host, own: Circuit) -> None:
        self._shared, self._host, self._own = host, host.circuit, own
        self._under_way = 0

    @property
    def free(self) -> int:
        """How many more requests the host takes now from this topic."""
        return max(0, (self._shared.free - self._under_way + 1) // 2)

    @property
    def open(self) -> bool:
        """Whether one of both is open."""
        return self._host.open or self._own.open

    def own_holds_up(self, now_ms: float) -> bool:
        """Return whether this receiver alone does not work, and something wants to go to it."""
        return self._own.holds_up(now_ms) and not self._host.open

    def wait_ms(self, now_ms: float) -> float:
        """Return how long nothing may be sent; see `Circuit`."""
        return max(self._host.wait_ms(now_ms), self._own.wait_ms(now_ms))

    def admit(self, now_ms: float) -> bool:
        """Return whether a request may go now. Tell its end."""
        admitted = self.free > 0 and self.wait_ms(now_ms) <= 0 and self._host.admit(now_ms) and self._own.admit(now_ms)
        self._under_way += admitted
        self._shared.under_way += admitted
        return admitted

    def answered(self, now_ms: float, works: bool) -> None:
        """Note an answer, and whether it is one of a receiver that works."""
        self._ended()
        self._host.succeeded()
        if works:
            self._own.succeeded()
        else:
            self._own.failed(now_ms)

    def unanswered(self, now_ms: float, reached: bool) -> None:
        """Note that no answer came, and whether there was a connection."""
        self._ended()
        if reached:
            self._host.succeeded()
            self._own.failed(now_ms)
        else:
            self._host.failed(now_ms)
            self._own.given_up()

    def given_up(self, probing: bool) -> None:
        """Note a request that ended without saying anything. `probing`: a circuit was open when it was admitted."""
        self._ended()
        if probing:
            self._host.given_up()
            self._own.given_up()

    def _ended(self) -> None:
        self._under_way -= 1
        self._shared.under_way -= 1
        free = self._shared.free
        if free & (free - 1) == 0:  # twice as much as when it was told last: not each end wakes all
            self._host.tell()

    def hear(self, told: Callable[[], None]) -> None:
        """Call `told` at the end of each probe."""
        self._host.hearers.add(told)
        self._own.hearers.add(told)

    def unhear(self, told: Callable[[], None]) -> None:
        """Do so no longer."""
        self._host.hearers.discard(told)
        self._own.hearers.discard(told)
