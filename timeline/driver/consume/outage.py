"""What a consumer says in the log about an outage: once when its broker is lost, once when it has one again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from timeline.clock import Clock
from timeline.driver.consume.subscription import Subscription

log = logging.getLogger("timeline.driver")


@dataclass(slots=True)
class Outage:
    """Between a consumer's streams. However many attempts fail meanwhile, an outage is told of twice, as a warning: so
    that a program which does not set up logging shows it, too."""

    subscription: Subscription
    clock: Clock
    since_ms: float | None = field(default=None, init=False)
    told: bool = field(default=False, init=False)

    def dismissed(self) -> None:
        """Its broker told it to leave: no outage if another one is there, else it counts from now."""
        if self.since_ms is None:
            self.since_ms = self.clock.monotonic_ms()

    def begins(self, why: str) -> None:
        """No broker is there: `why` names the address."""
        self.dismissed()
        if not self.told:
            self.told = True
            log.warning("consumer %s of %s lost its broker, and tries to reach one: %s", *self._who, why)

    def over(self, address: str) -> None:
        """The broker at `address` has welcomed the consumer."""
        if self.told and self.since_ms is not None:
            took_s = (self.clock.monotonic_ms() - self.since_ms) / 1000.0
            log.warning("consumer %s of %s has a broker again, at %s, after %.1f s", *self._who, address, took_s)
        self.since_ms, self.told = None, False

    @property
    def _who(self) -> tuple[str, str]:
        return self.subscription.consumer, self.subscription.topic
