"""What a storage plugin answered, looked at before the broker relies on it: a wrong answer costs that call alone."""

from __future__ import annotations

import numpy as np

from timeline.columns import ColumnBatch, Ragged
from timeline.model import Answers, Rows, Topic
from timeline.storage_plugins.contract import LeasedRows, Opened, Page, Swept, TagStep

_KINDS: dict[str, type] = {
    "put": Answers, "settle": Answers, "mutate": Answers, "mutate_tag": TagStep, "lease_due": LeasedRows,
    "held_by": Page, "scan": Page, "count_due": np.ndarray, "sweep": Swept, "topics": list, "create_topic": Topic,
    "update_topic": Topic, "inspect": Opened,
}  # fmt: skip
"""What each call answers with. Other calls may answer anything."""


def flaw_of(name: str, answer: object, asked: int) -> str:
    """Return what is wrong with the `answer` to a call; empty: nothing. `asked`: how many messages a put, settle or
    mutate is about, or how many grants a lease has."""
    kind = _KINDS.get(name, object)
    if not isinstance(answer, kind):
        return f"answered {name} with {answer!r:.80}, not {kind.__name__}"
    if isinstance(answer, Answers):
        if _length(answer.status) != asked:
            return f"gave {_length(answer.status)} answers for {asked} messages"
        return _unequal(answer, asked)
    return _leased(answer, asked) if isinstance(answer, LeasedRows) else ""


def _leased(leased: LeasedRows, grants: int) -> str:
    rows: object = leased.rows
    buried: object = leased.buried
    next_due_ms: object = leased.next_due_ms
    if not isinstance(rows, Rows) or not isinstance(buried, Rows):
        return f"leased {rows!r:.80} and buried {buried!r:.80}, not Rows"
    count = _length(rows.ids)
    if _length(leased.grant) != count or _length(leased.was_due_ms) != count:
        return f"leased {count} rows, and said of another number what they were"
    if count and int(leased.grant.max()) >= grants:
        return f"leased for grant {int(leased.grant.max())} of {grants}"
    if next_due_ms is not None and not isinstance(next_due_ms, int | np.integer):
        return f"said {next_due_ms!r:.80} of when more is due"
    return _unequal(rows, count)


def _unequal(batch: ColumnBatch, count: int) -> str:
    """Return which column of `batch` has not `count` items of its type; empty: none."""
    for field in batch.columns:
        column = getattr(batch, field.name)
        if field.kind in ("numbers", "strings") and not (column is None and field.optional):
            kind = np.ndarray if field.kind == "numbers" else Ragged
            if not isinstance(column, kind) or _length(column) != count:
                return f"answered with a {field.name} of {_length(column)} items for {count} messages"
            if isinstance(column, np.ndarray) and column.dtype.kind not in "biu":
                return f"answered with a {field.name} of {column.dtype}, not integers"
    return ""


def _length(column: object) -> int:
    """Return how many items `column` has; -1: it is no column."""
    return len(column) if isinstance(column, np.ndarray | Ragged) else -1
