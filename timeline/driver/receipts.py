"""The answers to a producer: a receipt for each message, or its error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, overload

import numpy as np

from timeline import errors
from timeline.columns import Bools, Indexes, Ragged
from timeline.driver.times import as_datetime, shown_utc
from timeline.errors import TimelineError
from timeline.model import Answers, Operation, Status

OK = Status.OK.code
DUPLICATE = Status.DUPLICATE.code
EXISTS = Status.EXISTS.code
NOT_FOUND = Status.NOT_FOUND.code
THROTTLED = Status.THROTTLED.code
UNAVAILABLE = Status.UNAVAILABLE.code
UNKNOWN = Status.UNKNOWN.code
STORED_BEFORE = 2
"""`Answers.repeat` of a put that found its own message in the store. 1: it had moved another message."""

_ERRORS: dict[int, type[TimelineError]] = {
    Status(kind.code).code: kind
    for kind in (
        errors.Invalid, errors.TooLarge, errors.Throttled, errors.NotFound, errors.Forbidden, errors.Fenced,
        errors.Leased, errors.Dead, errors.Exists, errors.Expired, errors.Unavailable, errors.Unknown,
    )
}  # fmt: skip


def error_of(
    status: int,
    id: str | None,
    detail: str = "",
    retry_after_ms: int = 0,
    operation: Operation | None = None,
    trouble: TimelineError | None = None,
) -> TimelineError:
    """Return the exception for status code `status`, which is neither OK nor DUPLICATE. A code that this version does
    not know is UNKNOWN. `operation`: the call, which its advice depends on. `trouble`: why it was not sent."""
    kind = _ERRORS.get(status, errors.Unknown)
    advice = "" if operation is None else errors.ADVICE_OF_CALLS.get((operation.name.lower(), kind.code), "")
    error = kind(detail, id=id, retry_after_ms=retry_after_ms, advice=advice)
    if trouble is not None:
        error.lasting, error.found = trouble.lasting, trouble.found
    return error


class MessageAnswer(NamedTuple):
    """One message's definite answer. `status`: a code. `trouble`: why it could not be sent."""

    status: int
    version: int = 0
    due_ms: int = 0
    settled: bool = False
    repeat: int = 0
    detail: str = ""
    retry_after_ms: int = 0
    trouble: TimelineError | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message's answer.

    `status`: OK, or DUPLICATE: the message was there already, or was delivered before (`settled`). A receipt of a batch
    may have any other status. `version`, `due_ms`: the message as it stands now, 0 if there is none. `detail`: a
    sentence for a refusal. `retry_after_ms`: the wait that the broker asked for, or 0. `operation`: the call, if known.
    `moved`: a put with `if_exists="move"` found a message and changed only its due time. Then payload, tag, headers and
    expiry of the call were not stored.
    """

    id: str
    status: Status
    version: int
    due_ms: int
    settled: bool = False
    detail: str = ""
    retry_after_ms: int = 0
    operation: Operation | None = field(default=None, compare=False)
    moved: bool = False

    def __repr__(self) -> str:
        told = [repr(self.id), self.status.value]
        if self.due_ms:
            told.append(f"due {shown_utc(self.due_ms)}")
        told += [word for word, so in (("settled", self.settled), ("moved", self.moved)) if so]
        if self.detail:
            told.append(repr(self.detail))
        return f"Receipt({', '.join(told)})"

    @property
    def due(self) -> datetime | None:
        """The due time, an aware datetime in UTC. For a leased message: the end of its lease. For a dead letter: the
        end of its last lease. None if there is no message now."""
        return as_datetime(self.due_ms) if self.due_ms else None

    @property
    def ok(self) -> bool:
        """Whether the status is OK or DUPLICATE."""
        return self.status is Status.OK or self.status is Status.DUPLICATE

    def raise_failed(self) -> None:
        """Raise the status as its error, unless it is `ok`."""
        if not self.ok:
            raise error_of(self.status.code, self.id, self.detail, self.retry_after_ms, self.operation)


def receipt_of(id: bytes, answer: MessageAnswer, operation: Operation, moves: bool = False) -> Receipt:
    """Return the receipt for one message's answer to `operation`, or raise its error. `moves`: the call said "move"."""
    status = answer.status
    if status in (OK, DUPLICATE):
        moved = moves and status == OK and answer.version > 1 and answer.repeat != STORED_BEFORE
        return Receipt(
            id.decode(), Status.of(status), answer.version, answer.due_ms, bool(answer.settled),
            operation=operation, moved=moved,
        )  # fmt: skip
    raise error_of(status, id.decode(), answer.detail, answer.retry_after_ms, operation, answer.trouble)


class Receipts(Sequence[Receipt]):
    """Receipts in the order of the call, as columns. An item is a `Receipt`, made when it is asked for.

    `status_codes`, `versions`, `due_ms`: numpy columns. `ids`: a Ragged column of bytes. `moves`: whether it was a put
    with `if_exists="move"`.
    """

    def __init__(
        self,
        ids: Ragged,
        answers: Answers,
        waits_ms: Mapping[int, int] | None = None,
        operation: Operation | None = None,
        moves: bool = False,
    ) -> None:
        self.ids = ids
        self._moves = moves
        self._operation = operation
        self._answers = answers
        self._waits_ms = waits_ms or {}

    @property
    def status_codes(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """`Status.code` of each."""
        return self._answers.status

    @property
    def versions(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The version of each message now, 0 where there is none."""
        return self._answers.version

    @property
    def due_ms(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The due time of each message now, milliseconds UTC, 0 where there is none."""
        return self._answers.due_ms

    @property
    def settled(self) -> Bools:
        """Which are DUPLICATE of a message that was delivered and settled before."""
        return self._answers.settled.astype(np.bool_)

    @property
    def moved(self) -> Bools:
        """Which found a message and changed only its due time, as `if_exists="move"` asks."""
        answers = self._answers
        moved: Bools = (answers.status == OK) & (answers.version > 1) & (answers.repeat != STORED_BEFORE) & self._moves
        return moved

    @property
    def repeats(self) -> Bools:
        """Which calls were recognised as done already. A put is recognised by its birth."""
        return self._answers.repeat.astype(np.bool_)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> Receipts: ...
    def __getitem__(self, index: int | slice) -> Receipt | Receipts:
        if isinstance(index, slice):
            return self._at(np.arange(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        answers = self._answers
        return Receipt(
            self.ids[place].decode(),
            Status.of(int(answers.status[place])),
            int(answers.version[place]),
            int(answers.due_ms[place]),
            bool(answers.settled[place]),
            answers.details.get(place, ""),
            self._waits_ms.get(place, 0),
            self._operation,
            bool(self[place : place + 1].moved[0]) if self._moves else False,
        )

    def _at(self, places: Indexes) -> Receipts:
        asked = self._waits_ms
        waits_ms = {at: asked[place] for at, place in enumerate(places.tolist()) if place in asked} if asked else None
        return Receipts(self.ids.take(places), self._answers.take(places), waits_ms, self._operation, self._moves)

    @property
    def failed(self) -> Receipts:
        """The receipts that are neither OK nor DUPLICATE."""
        status = self._answers.status
        return self._at(np.flatnonzero((status != OK) & (status != DUPLICATE)))

    @property
    def counts(self) -> dict[Status, int]:
        """The number of messages by status."""
        return {Status.of(code): many for code, many in sorted(Counter(self._answers.status.tolist()).items())}

    def raise_failed(self) -> Receipts:
        """Return itself if none failed. Raise the first failure's error otherwise; it counts the others."""
        failed = self.failed
        if len(failed) == 0:
            return self
        first = failed[0]
        more = f" (and {len(failed) - 1} more of {len(self)} failed)" if len(failed) > 1 else ""
        error: TimelineError = error_of(first.status.code, first.id, first.detail, operation=self._operation)
        raise type(error)((first.detail or error.advice) + more, id=first.id, retry_after_ms=first.retry_after_ms)

    def __repr__(self) -> str:
        told = ", ".join(f"{many} {status}" for status, many in self.counts.items())
        return f"Receipts({told or 'none'})"
