"""A row of the outbox, as whoever put it there meant it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta

from timeline.driver.message import Message
from timeline.driver.times import When, as_datetime
from timeline.errors import Invalid

REASON_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Row:
    """One message that waits to be sent. Times are milliseconds; exactly one of `due_ms` and `in_ms` is set."""

    seq: int
    topic: str
    grp: str
    id: str
    payload: bytes
    due_ms: int | None
    in_ms: int | None
    expires_ms: int | None
    expires_in_ms: int | None
    tag: str | None
    headers: str | None
    flaw: str = ""
    """Why none of it can be sent."""

    def message(self) -> Message:
        """What is to be sent. Raises Invalid or TooLarge: the table is open to whoever can insert a row."""
        if self.flaw:
            raise Invalid(self.flaw)
        expires = None if self.expires_in_ms is None else _length(self.expires_in_ms)
        return Message(
            self.payload,
            at=None if self.due_ms is None else _point(self.due_ms),
            in_=None if self.in_ms is None else _length(self.in_ms),
            id=self.id,
            tag=self.tag,
            headers=_headers(self.headers),
            expires=expires if self.expires_ms is None else _point(self.expires_ms),
        )


COLUMNS = tuple(field.name for field in fields(Row) if field.name != "flaw")
"""Those of the table that make a row."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that was set aside. `refused_ms`: when, milliseconds UTC; `reason`: why."""

    seq: int
    topic: str
    group: str
    id: str
    due_ms: int | None
    refused_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """How much stands in the table. `oldest_ms`: since when the oldest row waits, milliseconds UTC; 0: none does."""

    waiting: int
    set_aside: int
    oldest_ms: int


def _point(millis: int) -> When:
    # A due before 1970 is 1 in a row; as an int that would look like seconds.
    return as_datetime(1) if millis == 1 else millis


def _length(millis: int) -> timedelta:
    try:
        return timedelta(milliseconds=millis)
    except (OverflowError, TypeError, ValueError):
        raise Invalid(f"in_ms and expires_in_ms are milliseconds, at most 36600 days, not {millis!r:.60}") from None


def _headers(text: str | None) -> Mapping[str, str] | None:
    if not text:
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise Invalid(f"headers must be an object of texts in JSON: {bad}") from None
    if not isinstance(read, dict):
        raise Invalid(f"headers must be an object of texts in JSON, not {text!r:.40}")
    return read
