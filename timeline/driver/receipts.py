"""What a producer gets back: a receipt a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import overload

import numpy as np

from timeline.columns import Bools, Indexes, Ragged
from timeline.driver.produce.request_batch import DUPLICATE, OK, STORED_BEFORE, MessageAnswer, error_of
from timeline.driver.times import as_datetime
from timeline.errors import TimelineError
from timeline.model import Answers, Operation, Status


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message's answer. `status`: OK, DUPLICATE (it was there already, or was delivered: `settled`), or, out of
    a batch, what refused it. `version`, `due_ms`: the message as it stands now, 0 when there is none. `detail`: a
    sentence for a refusal. `retry_after_ms`: the wait that the broker asked for, 0 when it asked for none.
    `operation`: what was asked, where that is known. `moved`: of a put with `if_exists="move"`, whether a message was
    there and only its due was changed: payload, tag, headers and expires of the call were not stored."""

    id: str
    status: Status
    version: int
    due_ms: int
    settled: bool = False
    detail: str = ""
    retry_after_ms: int = 0
    operation: Operation | None = field(default=None, repr=False, compare=False)
    moved: bool = field(default=False, repr=False)

    @property
    def due(self) -> datetime | None:
        """When it is due, an aware datetime in UTC; None when no message stands there now."""
        return as_datetime(self.due_ms) if self.due_ms else None

    @property
    def ok(self) -> bool:
        """Whether the call did what it was asked: OK or DUPLICATE."""
        return self.status is Status.OK or self.status is Status.DUPLICATE

    def raise_failed(self) -> None:
        """Raises the status as its error, unless it is `ok`."""
        if not self.ok:
            raise error_of(self.status.code, self.id, self.detail, self.retry_after_ms, self.operation)


def receipt_of(id: bytes, answer: MessageAnswer, operation: Operation, moves: bool = False) -> Receipt:
    """The receipt for one message's answer to `operation`, or its error, raised. `moves`: asked with "move"."""
    status = answer.status
    if status in (OK, DUPLICATE):
        moved = moves and status == OK and answer.version > 1 and answer.repeat != STORED_BEFORE
        return Receipt(
            id.decode(), Status.of(status), answer.version, answer.due_ms, answer.settled,
            operation=operation, moved=moved,
        )  # fmt: skip
    raise error_of(status, id.decode(), answer.detail, answer.retry_after_ms, operation, answer.trouble)


class Receipts(Sequence[Receipt]):
    """Receipts in the order of what was sent, as columns; a `Receipt` is made when one is asked for.

    `status_codes`, `versions`, `due_ms`: numpy columns. `ids`: a Ragged column of bytes. `moves`: whether a put asked
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
        """The version of each as it stands; 0 where there is none."""
        return self._answers.version

    @property
    def due_ms(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The due of each as it stands; 0 where there is none."""
        return self._answers.due_ms

    @property
    def settled(self) -> Bools:
        """Which are DUPLICATE of what was delivered and settled before."""
        return self._answers.settled.astype(np.bool_)

    @property
    def moved(self) -> Bools:
        """Which found a message and changed only its due, as `if_exists="move"` asks."""
        answers = self._answers
        moved: Bools = (answers.status == OK) & (answers.version > 1) & (answers.repeat != STORED_BEFORE) & self._moves
        return moved

    @property
    def repeats(self) -> Bools:
        """Which calls were recognised as done already: of a put, the very same birth."""
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
        """Those that are neither OK nor DUPLICATE."""
        status = self._answers.status
        return self._at(np.flatnonzero((status != OK) & (status != DUPLICATE)))

    @property
    def counts(self) -> dict[Status, int]:
        """How many got each status."""
        return {Status.of(code): many for code, many in sorted(Counter(self._answers.status.tolist()).items())}

    def raise_failed(self) -> Receipts:
        """Itself when none failed, else the first failure's error, which says how many more there are."""
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
