"""Many messages to put, as columns: lists, numpy and Arrow arrays, read without an object per message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from timeline.columns import Bools, Int64, Ragged, Text, UInt8, UInt64
from timeline.driver.message import Headers, Message, check_headers, check_payload, encode_id, encode_tag
from timeline.driver.times import LOOKS_LIKE_SECONDS, duration_ms, expiry_ms, instant_ms, shown
from timeline.errors import Invalid, TooLarge
from timeline.model import ID_TEXT, MAX_DURATION_MS, MAX_PAYLOAD_BYTES, MAX_TIME_MS, TAG_TEXT, Status
from timeline.wire import Judgement, PutFlag
from timeline.wire.validate import validate_texts

_EMPTY = {"payloads": ", if empty then b''"}
_OR_ONE = dict.fromkeys(("at", "in_", "expires", "tags", "headers"), ", or one for all")


class Batch:
    """Many messages as columns, without an object per message.

        Batch(payloads=[b"a", b"b"], at=[t1, t2])
        Batch(payloads=column, in_="15m", ids=ids)

    - `payloads`: a list of bytes, a `Ragged`, a numpy array of dtype object or `V…`, or an Arrow array of binary.
      Arrays of dtype `S…` are refused, because numpy drops NULs at the end of an item.
    - `at`: one due time for all, or one each. A list, or an integer array of milliseconds UTC.
    - `in_`: instead of `at`, one duration for all, or one each. A list, or a numpy array of seconds.
    - `ids`, `tags`: texts or bytes, one each. Arrays of dtype `S…` are allowed. `tags` may be one text for all.
    - `headers`: one mapping for all, or a list with one for each.
    - `expires`: times as for `at`, or times from now: a timedelta or a text.

    A data frame's column may stand for a list, and so may `b.tags` and `b.headers` of a batch of deliveries. In lists
    of tags, headers and expiries, None is none, and so is a null tag. Other nulls and masked times are refused.

    Missing ids are made when the batch is first sent, and stay, so that sending it again doubles nothing. To make
    the same batch again after a crash and have it recognised, give `ids`, and set `births`: 64 bits each, not 0. They
    are an array or a list of ints. By default each call draws new ones. Payloads are not compared: another one under
    the same id and birth is dropped, and its receipt is OK.

    A message out of range is refused alone: `refused` has its status and sentence by its index, and its receipt has
    them, too. Raise Invalid for an error that concerns all messages.
    """

    refused: Judgement
    _births: UInt64 | None = None

    def __init__(
        self,
        payloads: Any,
        at: Any = None,
        in_: Any = None,
        ids: Any = None,
        tags: Any = None,
        headers: Mapping[str, str] | Sequence[Mapping[str, str] | None] | Ragged | None = None,
        expires: Any = None,
    ) -> None:
        bad = self.refused = Judgement()
        self.payloads = _bytes_column(payloads, "payloads", bad)
        count = self._count = len(self.payloads)
        _judge_payloads(self.payloads, bad)
        if (at is None) == (in_ is None):
            raise Invalid("say either at= (points in time) or in_= (how long from now), one of the two")
        self.flags: UInt8 = np.full(count, 0 if in_ is None else PutFlag.IN, dtype=np.uint8)
        self.time_ms = instants(at, count, "at", bad) if at is not None else durations(in_, count, bad)
        self.ids = None if ids is None else ids_column(ids, count, bad)
        self.tags = None if tags is None else _tags_column(tags, count, bad)
        self.headers = None if headers is None else _headers_column(headers, count, bad)
        self.expires_ms = None if expires is None else self._expiries(expires, count)

    def __len__(self) -> int:
        return self._count

    def _expiries(self, expires: Any, count: int) -> Int64:
        each = _one_each(expires, count, "expires", self.refused)
        if each is None:
            read = [expiry_ms(expires)] * count
        elif isinstance(each, list | tuple):
            none = (0, False)
            read = [
                none if one is None else _one("expires", place, expiry_ms, one, self.refused, none)
                for place, one in enumerate(each)
            ]
        else:
            return _instants_column(each, "expires", self.refused)
        relative = np.fromiter((from_now for _, from_now in read), dtype=np.bool_, count=count)
        self.flags[relative] |= np.uint8(PutFlag.EXPIRES_IN)
        return np.fromiter((millis for millis, _ in read), dtype=np.int64, count=count)

    @property
    def births(self) -> UInt64 | None:
        """The births by which a repeated put is recognised. None: drawn when the batch is sent."""
        return self._births

    @births.setter
    def births(self, births: UInt64 | Sequence[int] | None) -> None:
        self._births = None if births is None else numbers_column(births, self._count, "births")

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Batch:
        """Return the columns of `messages`."""
        try:
            each = iter(messages)
        except TypeError:
            kind = type(messages).__name__
            raise Invalid(f"many messages are a Batch or an iterable of timeline.Message, not {kind}") from None
        listed: list[Any] = list(each)
        batch = cls.__new__(cls)
        batch._count = count = len(listed)
        batch.refused = Judgement()
        for place, message in enumerate(listed):
            if not isinstance(message, Message):
                said = f"item {place} must be a timeline.Message, not {type(message).__name__}"
                batch.refused[place] = Status.INVALID, said
                listed[place] = Message(b"", in_=0)
        rows = [message.encoded for message in listed]
        batch.payloads = Ragged.of([message.payload for message in listed])
        batch.ids = Ragged.of([row[0] for row in rows]) if rows else None
        batch.time_ms = np.fromiter((row[1] for row in rows), dtype=np.int64, count=count)
        batch.flags = np.fromiter((row[2] for row in rows), dtype=np.uint8, count=count)
        batch.expires_ms = _column_or_none(np.fromiter((row[3] for row in rows), dtype=np.int64, count=count))
        batch.tags = _ragged_or_none([row[4] for row in rows])
        batch.headers = _ragged_or_none([row[5] for row in rows])
        return batch


def _column_or_none(column: Int64) -> Int64 | None:
    return column if column.any() else None


def _ragged_or_none(items: list[bytes]) -> Ragged | None:
    return Ragged.of(items) if any(items) else None


def numbers_column(numbers: Any, count: int, name: str) -> UInt64:
    """Return `count` births or operation ids as a column. Raise Invalid."""
    each = _one_each(numbers, count, name, None)
    if isinstance(each, list | tuple) and all(is_number(one) for one in each):
        each = np.array(each, dtype=np.uint64)
    if not isinstance(each, np.ndarray) or each.dtype.kind not in "iu" or (each < 1).any():
        raise Invalid(f"{name} must be {count} ints of 64 bits, an array or a list, none of them 0 or negative")
    return each.astype(np.uint64)


def is_number(value: object) -> bool:
    """Return whether a value may be a birth or the id of an operation: 64 bits, not 0."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 < int(value) < 1 << 64


def _check_length(items: Any, count: int, name: str) -> None:
    if getattr(items, "ndim", 1) != 1:
        raise Invalid(f"{name} must be one-dimensional, one item a message, not of shape {items.shape}")
    if len(items) != count:
        raise Invalid(f"{name} has {len(items)} items for {count} messages: one each{_OR_ONE.get(name, '')}")


def _bytes_column(items: Any, name: str, bad: Judgement) -> Ragged:
    """Return byte strings in any allowed form as a column."""
    if isinstance(items, Ragged):
        return items
    if isinstance(items, np.ndarray):
        return _from_numpy(items, name, bad)
    if _is_arrow(items):
        return arrow_column(items, name, bad)
    if isinstance(items, str | bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise Invalid(
            f"{name} must be a column (list, Ragged, numpy or Arrow array) of bytes, not {type(items).__name__}"
        )
    listed = list(items)
    if set(map(type, listed)) - {bytes}:
        listed = [_one(name, place, check_payload, item, bad, b"") for place, item in enumerate(listed)]
    return Ragged.of(listed)


def _judge_payloads(payloads: Ragged, bad: Judgement) -> None:
    if len(payloads) and int(payloads.sizes.max()) > MAX_PAYLOAD_BYTES:
        for place in np.flatnonzero(payloads.sizes > MAX_PAYLOAD_BYTES).tolist():
            said = f"a payload is above {MAX_PAYLOAD_BYTES} bytes, which no topic takes"
            bad.setdefault(place, (Status.TOO_LARGE, f"payloads[{place}]: {said}"))


def _from_numpy(items: npt.NDArray[Any], name: str, bad: Judgement) -> Ragged:
    if items.dtype.kind == "S":
        raise Invalid(
            f"{name} must not be a numpy array of dtype S ({items.dtype}): numpy drops the NULs at the end of each "
            "item. Build a list of bytes, an array of dtype object, or Arrow binary from the original values, "
            "because astype() and tolist() drop the NULs, too"
        )
    if items.ndim != 1 or items.dtype.kind not in "VO":
        raise Invalid(f"{name} must be a one-dimensional array of bytes (dtype object or V), not {items.dtype}")
    return _bytes_column(items.tolist(), name, bad)


def arrow_column(items: Any, name: str, bad: Judgement | None = None) -> Ragged:
    """Return an Arrow array of binary or text as a column, without a copy. A null is bad, but a null tag is no tag.
    `bad` (here and below) collects the errors of single items by index. None: raise the first one."""
    array = items.combine_chunks() if hasattr(items, "combine_chunks") else items
    wide = {"binary": np.int32, "string": np.int32, "large_binary": np.int64, "large_string": np.int64}
    if str(array.type) not in wide:
        raise Invalid(
            f"{name} must be an Arrow array of binary or string, not {array.type}: array.cast('binary') makes one"
        )
    if array.null_count:
        if name != "tags":
            _note_nulls(array.is_null().to_numpy(zero_copy_only=False), name, bad)
        array = array.fill_null("")
    if hasattr(array, "num_chunks"):  # combine_chunks of older Arrow keeps a chunked array
        return Ragged.concat([arrow_column(chunk, name) for chunk in array.chunks])
    _, offsets, data = array.buffers()
    marks = np.frombuffer(offsets, dtype=wide[str(array.type)])[array.offset : array.offset + len(array) + 1]
    return Ragged(memoryview(data) if data is not None else b"", marks.astype(np.int64))


def _note_nulls(nulls: Bools, name: str, bad: Judgement | None) -> None:
    for place in np.flatnonzero(nulls).tolist():
        _note(bad, place, Invalid(f"{name}[{place}] is null: each message has one{_EMPTY.get(name, '')}"))


def _note(bad: Judgement | None, place: int, error: Invalid | TooLarge) -> None:
    """Note the error of one item, if it is its first. Raise it if `bad` is None."""
    if bad is None:
        raise error
    bad.setdefault(place, (Status(error.code), error.reason))


def _one(name: str, place: int, read: Any, item: Any, bad: Judgement | None, instead: Any) -> Any:
    try:
        return read(item)
    except (Invalid, TooLarge) as wrong:
        _note(bad, place, type(wrong)(f"{name}[{place}]: {wrong.reason}", advice=wrong.advice))
        return instead


def _texts_column(items: Any, count: int, name: str, read: Any, bad: Judgement | None) -> Ragged:
    if not isinstance(items, Ragged):
        if not isinstance(items, Iterable):
            raise Invalid(f"{name} must be texts, one each (a list, a numpy or an Arrow array), not {shown(items)}")
        if isinstance(items, np.ndarray) or not _is_column(items):
            listed = items.tolist() if isinstance(items, np.ndarray) else list(items)
            _check_length(listed, count, name)

            def of_text(item: Any) -> Any:
                return read(_decoded(item))

            return Ragged.of([_one(name, place, of_text, item, bad, _shown(item)) for place, item in enumerate(listed)])
        items = arrow_column(items, name, bad)
    _check_length(items, count, name)
    column: Ragged = items
    return column


def _decoded(item: Any) -> Any:
    """Return bytes as text. Raise Invalid if they are not UTF-8."""
    if not isinstance(item, bytes):
        return item
    try:
        return item.decode()
    except UnicodeDecodeError:
        raise Invalid(f"bytes of a text must be UTF-8, not {item!r:.80}") from None


def _shown(item: object) -> bytes:
    """Return the text that a receipt shows for a wrong id."""
    if isinstance(item, bytes):
        item = item.decode(errors="replace")
    return (item if isinstance(item, str) else shown(item)).encode(errors="replace")


def ids_column(ids: Any, count: int, bad: Judgement | None = None) -> Ragged:
    """Return ids as a column: texts or bytes in a list, a `Ragged`, a numpy or an Arrow array. Raise Invalid."""
    if isinstance(ids, str | bytes):
        raise Invalid("ids must be one id each, not one for all: an id is unique in its topic")
    if isinstance(ids, list) and set(map(type, ids)) == {bytes}:
        ids = Ragged.of(ids.copy())  # checked as a column; the caller may change the list
    return _sound(_texts_column(ids, count, "ids", encode_id, bad), "ids", ID_TEXT, bad)


def _sound(column: Ragged, name: str, text: Text, bad: Judgement | None) -> Ragged:
    """Return `column` after a check of all items. Wrong ones are replaced by a readable text."""
    wrong = validate_texts(column, text)
    for place, why in wrong.items():
        _note(bad, place, Invalid(f"{name}[{place}]: {why}"))
    return Ragged.of([_shown(item) for item in column]) if wrong else column


def _tags_column(tags: Any, count: int, bad: Judgement) -> Ragged:
    if isinstance(tags, str):
        return Ragged.repeat(encode_tag(tags), count)
    return _sound(_texts_column(tags, count, "tags", encode_tag, bad), "tags", replace(TAG_TEXT, nul=False), bad)


def _headers_column(headers: Any, count: int, bad: Judgement) -> Ragged:
    if isinstance(headers, Mapping):
        return Ragged.repeat(check_headers(headers), count)
    if isinstance(headers, Headers):
        headers = headers.encoded
    if isinstance(headers, Ragged):
        _check_length(headers, count, "headers")
        return headers
    if not isinstance(headers, Iterable) or not hasattr(headers, "__len__") or isinstance(headers, str | bytes):
        raise Invalid(f"headers must be one mapping for all, or a list of one each, not {shown(headers)}")
    _check_length(headers, count, "headers")
    return Ragged.of([_one("headers", place, check_headers, item, bad, b"") for place, item in enumerate(headers)])


def encode_ids(ids: Any, bad: Judgement | None = None) -> Ragged:
    """Return ids in any form that a batch takes as a column. Raise Invalid."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise Invalid(f"ids must be a list of ids, not {shown(ids)}")
    listed: Any = ids if hasattr(ids, "__len__") else list(ids)
    return ids_column(listed, len(listed), bad)


def _is_column(values: Any) -> bool:
    """Return whether `values` is a numpy or Arrow array."""
    return values.ndim > 0 if isinstance(values, np.ndarray) else _is_arrow(values)


def _is_arrow(values: Any) -> bool:
    return hasattr(values, "to_numpy") and hasattr(values, "type")


def _one_each(values: Any, count: int, name: str, bad: Judgement | None) -> Any:
    """Return `values` if there is one per message: a list, a numpy or an Arrow array without nulls. None: one for all.
    A data frame's column becomes its array, and an array of objects a list."""
    if not _is_column(values) and hasattr(values, "to_numpy") and hasattr(values, "__len__"):
        values = values.to_numpy()
    if not isinstance(values, list | tuple) and not _is_column(values):
        return None
    _check_length(values, count, name)
    if not isinstance(values, np.ndarray):
        if getattr(values, "null_count", 0):
            _note_nulls(values.is_null().to_numpy(zero_copy_only=False), name, bad)
            values = values.fill_null(0)
        return values
    if isinstance(values, np.ma.MaskedArray):
        _note_nulls(np.ma.getmaskarray(values), name, bad)
    return values.tolist() if values.dtype.kind == "O" else np.asarray(values)


def instants(at: Any, count: int, name: str = "at", bad: Judgement | None = None) -> Int64:
    """Return `at=` as milliseconds UTC: one time for all, or one each in a list, a numpy or an Arrow array."""
    each = _one_each(at, count, name, bad)
    if each is None:
        return np.full(count, instant_ms(at, name), dtype=np.int64)
    if isinstance(each, list | tuple):
        return np.fromiter((_instant(name, place, one, bad) for place, one in enumerate(each)), np.int64, count)
    return _instants_column(each, name, bad)


def _instant(name: str, place: int, value: Any, bad: Judgement | None) -> int:
    read: int = _one(name, place, lambda one: instant_ms(one, name), value, bad, 1)
    return read


def _instants_column(at: Any, name: str, bad: Judgement | None) -> Int64:
    """Return a numpy or Arrow array of times as milliseconds UTC."""
    if not isinstance(at, np.ndarray):
        if str(at.type).startswith("timestamp["):
            return _of_timestamps(at, name, bad)
        if not str(at.type).startswith(("int", "uint")):
            raise Invalid(f"{name} must be an Arrow array of timestamps, or of milliseconds UTC, not {at.type}")
        at = at.to_numpy()
    if at.dtype.kind not in "iu":
        raise Invalid(f"{name} must be an array of integer milliseconds UTC, not {at.dtype}")
    wrong = (at < LOOKS_LIKE_SECONDS) | (at > MAX_TIME_MS)
    read: Int64 = at.astype(np.int64)
    for place in np.flatnonzero(wrong).tolist():
        read[place] = _instant(name, place, int(at[place]), bad)
    return read


def _of_timestamps(at: Any, name: str, bad: Judgement | None) -> Int64:
    """Return Arrow timestamps as milliseconds UTC, rounded up. Times outside of 1970 to 9999 are refused before the
    multiplication, in which 64 bits could wrap to any time."""
    kind = str(at.type)
    if ", tz=" not in kind:
        raise Invalid(f"{name} is {kind} without a time zone: cast it to one with tz='UTC' if that is what it means")
    unit = kind[len("timestamp[") :].partition(",")[0]
    ticks_each, ms_each = {"s": (1, 1_000), "ms": (1, 1), "us": (1_000, 1), "ns": (1_000_000, 1)}[unit]
    ticks: Int64 = at.cast("int64").to_numpy()
    before, beyond = ticks <= 0, ticks > MAX_TIME_MS // ms_each * ticks_each
    for place in np.flatnonzero(before).tolist():
        said = f"{name}[{place}]: {name} must be a time after the start of 1970, not {ticks[place]} {unit}"
        _note(bad, place, Invalid(said))
    for place in np.flatnonzero(beyond).tolist():
        said = f"{name} must be at most {MAX_TIME_MS} ms (the year 9999), not {ticks[place]} {unit}"
        _note(bad, place, Invalid(f"{name}[{place}]: {said}"))
    millis: Int64 = -(-np.where(before | beyond, 1, ticks) // ticks_each) * ms_each
    return millis


def durations(in_: Any, count: int, bad: Judgement | None = None) -> Int64:
    """Return `in_=` in milliseconds: one duration for all, or one each in a list or a numpy array of seconds."""
    each = None if _is_arrow(in_) else _one_each(in_, count, "in_", bad)
    if isinstance(each, np.ndarray):
        if each.dtype.kind not in "iuf":
            raise Invalid(f"in_ as an array is seconds, not {each.dtype}")
        seconds = each.astype(np.float64)  # a narrower type would round microseconds to whole seconds
        wrong = ~((seconds >= 0) & (seconds <= MAX_DURATION_MS / 1000))
        for place in np.flatnonzero(wrong).tolist():
            said = f"in_ is 0 seconds to 36600 days from now, not {each[place]} seconds; for points in time use at="
            _note(bad, place, Invalid(f"in_[{place}]: {said}"))
        return np.ceil(np.round(np.where(wrong, 0, seconds) * 1e6) / 1e3).astype(np.int64)
    if each is not None:
        read = (_one("in_", place, duration_ms, one, bad, 0) for place, one in enumerate(each))
        return np.fromiter(read, np.int64, count)
    return np.full(count, duration_ms(in_), dtype=np.int64)
