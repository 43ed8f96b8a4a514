"""What the receiver's answer means for the message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import NamedTuple

from timeline.driver.times import duration_ms
from timeline.errors import Invalid
from timeline.model import DELIVERED_OUT, fitting_reason

LEASE_HEADER = "timeline-lease"
MOST_RETRY_AFTER_MS = 86_400_000
"""A receiver may ask for a wait up to a day. A longer one counts as a day."""
SHOWN_BYTES = 1_024
"""Of a response's body, in reasons."""
BROKEN = range(500, 600)
"""Answers of a receiver that does not work."""


class Verb(StrEnum):
    """What happens to the message. KEEP: the lease goes on, and the receiver settles it by its receipt. RETURN: nothing
    was sent, and the delivery does not count."""

    ACK = "ack"
    KEEP = "keep"
    BURY = "bury"
    RELEASE = "release"
    RETURN = "return"


class Settlement(NamedTuple):
    """`wait_ms`: of a RELEASE; None: the topic's backoff. `lease_ms`: of a KEEP. `broken`: the receiver does not work,
    as far as this answer shows. `status`: of the answer that gave the reason. None: there was none."""

    verb: Verb
    reason: str = ""
    wait_ms: int | None = None
    lease_ms: int = 0
    broken: bool = False
    status: int | None = None

    def last(self, deliveries: int, max_deliveries: int) -> Settlement:
        """Return the outcome after the `deliveries`-th delivery. A message that had all that its topic permits is
        buried with the reason, not released. `max_deliveries` 0: any number."""
        if self.verb is not Verb.RELEASE or not 0 < max_deliveries <= deliveries:
            return self
        return self._replace(
            verb=Verb.BURY, reason=fitting_reason(f"{DELIVERED_OUT.decode()}: {self.reason}"), wait_ms=None
        )


def settlement_of(status: int, headers: Mapping[str, str], body: bytes, now_ms: int, max_lease_ms: int) -> Settlement:
    """Return what an answer means. `headers`: by lower-case name. `body`: its first bytes, for the reason."""
    if status == 202 and LEASE_HEADER in headers:
        text = headers[LEASE_HEADER].strip()[:64]
        try:
            lease_ms = duration_ms(int(text) if text.isdecimal() else text, "Timeline-Lease", least_ms=1)
        except Invalid as bad:
            return Settlement(Verb.RELEASE, fitting_reason(f"202: {bad.reason}"))
        return Settlement(Verb.KEEP, lease_ms=min(lease_ms, max_lease_ms))
    if 200 <= status < 300:
        return Settlement(Verb.ACK)
    reason = f"{status}: {body[:SHOWN_BYTES].decode('utf-8', 'replace')}" if body else str(status)
    if status == 410:
        return Settlement(Verb.BURY, fitting_reason(reason), status=status)
    if 300 <= status < 400:
        return Settlement(Verb.RELEASE, f"{status}: redirects are not followed. Set push_url to where it leads")
    wait_ms = retry_after_ms(headers.get("retry-after", ""), now_ms) if status in (429, 503) else None
    return Settlement(Verb.RELEASE, fitting_reason(reason), wait_ms, broken=status in BROKEN, status=status)


def unanswered(reason: str) -> Settlement:
    """Return what no answer means, or none in time."""
    return Settlement(Verb.RELEASE, fitting_reason(reason), broken=True)


def retry_after_ms(text: str, now_ms: int) -> int | None:
    """Return the wait that `Retry-After` asks for: seconds, or a date. None: it asks for none that can be read."""
    text = text.strip()[:64]
    if text.isascii() and text.isdigit():
        return min(MOST_RETRY_AFTER_MS, int(text) * 1_000)
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    at = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return min(MOST_RETRY_AFTER_MS, max(0, round(at.timestamp() * 1_000) - now_ms))
