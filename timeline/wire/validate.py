"""Bad messages of a sound frame: a batch never fails because one message in it does.

`decode` refuses a frame whose structure is bad. In Produce, Mutate and Settle it lets bad values of single messages
through: id, tag, headers, payload size, times, birth, operation id, reason. The broker asks here, and answers INVALID
or TOO_LARGE for those messages. In frames to a driver, `decode` refuses such values: brokers have judged them before.

A column without a bad item, the rule, is judged as a whole: one look at its bytes, one at its sizes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from timeline.columns import Bools, Int64, Ragged, Text, UInt64
from timeline.errors import Invalid
from timeline.model import (
    ID_TEXT,
    MAX_DURATION_MS,
    MAX_HEADERS_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TIME_MS,
    REASON_TEXT,
    TAG_TEXT,
    Operation,
    Status,
    canonical_headers,
)
from timeline.wire.frames import Mutate, MutateFlag, Produce, PutFlag, Settle, SettleFlag

Judgement: TypeAlias = dict[int, tuple[Status, str]]
"""Index of a refused message → its status, and a sentence with what is allowed. Empty: all are good."""

_MOVE_AND_REPLACE = PutFlag.MOVE | PutFlag.REPLACE
_FEW = 32
"""Up to here plain Python is quicker than a numpy reduction."""


def validate_headers(headers: Ragged | None) -> dict[int, str]:
    """Return index → sentence for headers that take more than 8 KiB or are not as `model.encode_headers` makes them."""
    return validate_sizes(headers, "headers", MAX_HEADERS_BYTES) | _misformed(headers)


def _misformed(headers: Ragged | None) -> dict[int, str]:
    """Leaves out headers that are too large: these are TOO_LARGE, the others INVALID."""
    if headers is None or not headers.nbytes:
        return {}
    verdicts: dict[bytes, str] = {b"": ""}
    bad: dict[int, str] = {}
    for index, item in enumerate(headers.tolist()):
        verdict = verdicts.get(item)
        if verdict is None and len(item) <= MAX_HEADERS_BYTES:
            verdict = verdicts[item] = _judge_header(item)
        if verdict:
            bad[index] = verdict
    return bad


def _judge_header(item: bytes) -> str:
    try:
        return "" if canonical_headers(item) else "headers must be sorted by key, each key once"
    except Invalid as bad:
        return bad.reason


def validate_sizes(column: Ragged | None, what: str, most: int) -> dict[int, str]:
    """Return index → sentence for items longer than `most` bytes."""
    if column is None or column.nbytes <= most:
        return {}
    sizes = column.sizes
    return {
        int(index): f"{what} may take {most} bytes, not {int(sizes[index])}" for index in np.flatnonzero(sizes > most)
    }


def validate_texts(column: Ragged | None, text: Text) -> dict[int, str]:
    """Return index → sentence for items that `text` does not allow."""
    what, least, most, nul = text.what, text.least, text.most, text.nul
    if column is None or _all_sound(column, least, most, nul):
        return {}
    bad: dict[int, str] = {}
    for index, item in enumerate(column.tolist()):
        if not least <= len(item) <= most:
            bad[index] = f"{what} takes {least} to {most} bytes, not {len(item)}"
        elif not nul and b"\0" in item:
            bad[index] = f"{what} must not contain a NUL character"
        elif not item.isascii() and not is_utf8(item):
            bad[index] = f"{what} must be UTF-8"
    return bad


def _all_sound(column: Ragged, least: int, most: int, nul: bool) -> bool:
    count = len(column)
    if not count:
        return True
    if count <= _FEW:
        marks = column.offsets.tolist()
        sizes = [high - low for low, high in pairwise(marks)]
        shortest, longest = min(sizes), max(sizes)
    else:
        widths = column.offsets[1:] - column.offsets[:-1]
        shortest, longest = int(widths.min()), int(widths.max())
    if shortest < least or longest > most:
        return False
    first = int(column.offsets[0])
    data = bytes(column.data[first : first + column.nbytes])
    if not nul and b"\0" in data:
        return False
    return data.isascii() or (is_utf8(data) and not _cuts_a_character(column, data, first))


def is_utf8(data: bytes) -> bool:
    """Return whether `data` is valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cuts_a_character(column: Ragged, data: bytes, first: int) -> bool:
    """Return whether an item starts in the middle of a character of the valid UTF-8 `data`."""
    starts = column.offsets[:-1][column.sizes > 0].astype(np.int64) - first
    return bool(((np.frombuffer(data, np.uint8)[starts] & 0xC0) == 0x80).any())


def within(column: npt.NDArray[np.integer], least: int, most: int) -> bool:
    """Return whether all values are `least` to `most`."""
    if len(column) <= _FEW:
        values = column.tolist()
        return not values or (min(values) >= least and max(values) <= most)
    return int(column.min()) >= least and int(column.max()) <= most


def _bad_times(times: Int64, relative: Bools, what: str = "a due time") -> dict[int, str]:
    """Allow times up to MAX_TIME_MS, and up to MAX_DURATION_MS those that are `relative`."""
    bad: dict[int, str] = {}
    if within(times, 0, MAX_DURATION_MS):
        return bad
    for index in np.flatnonzero((times < 0) | (times > MAX_DURATION_MS)).tolist():
        value = int(times[index])
        if relative[index]:
            bad[index] = f"{what} from now is 0 to {MAX_DURATION_MS} milliseconds, not {value}"
        elif not 0 <= value <= MAX_TIME_MS:
            bad[index] = f"{what} is 0 to {MAX_TIME_MS} milliseconds UTC (the end of the year 9999), not {value}"
    return bad


def _zeros(column: UInt64, what: str, concerned: Bools | None = None) -> dict[int, str]:
    if 0 not in (column.tolist() if len(column) <= _FEW else column):
        return {}
    zeros = column == 0 if concerned is None else (column == 0) & concerned
    return dict.fromkeys(np.flatnonzero(zeros).tolist(), f"{what} must be 64 random bits, not 0")


def _judged(bad: dict[int, str], *invalid: dict[int, str]) -> Judgement:
    """Return what is TOO_LARGE (`bad`) and what is INVALID. Later sentences go before earlier ones."""
    judged = {index: (Status.TOO_LARGE, sentence) for index, sentence in bad.items()}
    for found in invalid:
        for index, sentence in found.items():
            judged[index] = (Status.INVALID, sentence)
    return judged


def validate_produce(frame: Produce, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Judgement:
    """Judge the messages of `frame` that no store could put. INVALID goes before TOO_LARGE."""
    expires_ms, flags = frame.expires_ms, frame.flags
    both = (flags & _MOVE_AND_REPLACE) == _MOVE_AND_REPLACE
    return _judged(
        validate_sizes(frame.payloads, "a payload of this topic", max_payload_bytes)
        | validate_sizes(frame.headers, "headers", MAX_HEADERS_BYTES),
        _misformed(frame.headers),
        validate_texts(frame.tags, TAG_TEXT),
        {} if expires_ms is None else _bad_times(expires_ms, (flags & PutFlag.EXPIRES_IN) != 0, "an expiry"),
        _bad_times(frame.time_ms, (flags & PutFlag.IN) != 0),
        dict.fromkeys(np.flatnonzero(both).tolist(), "a put either moves or replaces, not both") if both.any() else {},
        _zeros(frame.birth, "a birth"),
        validate_texts(frame.ids, ID_TEXT),
    )


def validate_mutate(frame: Mutate) -> Judgement:
    """Judge the messages of `frame` that no store could move, cancel, revive or purge."""
    below = np.flatnonzero(frame.if_version < 0).tolist()
    return _judged(
        {},
        {at: f"if_version is 0 (any) or a version, not {int(frame.if_version[at])}" for at in below},
        _bad_times(frame.time_ms, (frame.flags & MutateFlag.IN) != 0),
        _zeros(frame.op, "an operation id") if frame.operation in (Operation.MOVE, Operation.REVIVE) else {},
        validate_texts(frame.ids, ID_TEXT),
    )


def validate_settle(frame: Settle) -> Judgement:
    """Judge the settles of `frame` that no store could count."""
    releases, times = frame.operation == Operation.RELEASE, {}
    if not within(frame.time_ms, 0, MAX_DURATION_MS):
        times = _bad_times(frame.time_ms, ~(releases & ((frame.flags & SettleFlag.AT) != 0)), "a time")
    return _judged(
        {},
        validate_texts(frame.reasons, REASON_TEXT),
        times,
        _zeros(frame.op, "an operation id", releases),
        validate_texts(frame.ids, ID_TEXT),
    )
