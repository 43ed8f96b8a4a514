"""Bytes ↔ frames, in both directions from one table: the declarations of `frames.py`.

A field's type and its `Range`, `Text` or `Form` say how it is read, and its range. The schema's layout says how it is
written. A few frames lie otherwise in bytes than in Python: the code for them is here. `decode` checks everything,
except values of Produce, Mutate and Settle that belong to single messages (see `validate.py`).

A frame is laid out from front to back, tables and vectors, and joined once. FlatBuffers' own Builder spends most of its
time on facts that the schema fixes, and copies a payload twice. Here each table has one fixed arrangement: all scalars
are written, the widest first. So a table is one `Struct.pack`, and its vtable a constant. A payload is copied once, by
the join.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from timeline.columns import Buffer, Field, Form, Ragged, Range, Text, UInt8, fields_of
from timeline.errors import Invalid, TooLarge
from timeline.model import (
    ID_TEXT,
    MAX_BATCH,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_ID_BYTES,
    MAX_PUSH_URL_BYTES,
    MAX_REASON_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    MAX_TOPIC_CHARS,
    REASON_TEXT,
    Answers,
    LeavingReason,
    State,
    Status,
    Topic,
    TopicSettings,
    check_topic_name,
)
from timeline.wire.frames import (
    MAJOR,
    MAX_COUNT,
    MAX_FRAME_BYTES,
    MINOR,
    Forecast,
    Forecasted,
    Frame,
    ScheduleAnswer,
    TagMutated,
    TopicAction,
    TopicList,
    Topics,
)
from timeline.wire.generated import layout
from timeline.wire.validate import is_utf8, validate_headers, validate_texts, within
from timeline.wire.verify import DTYPES, SCALARS, WIDTHS, Table, WireError, find_body

E = TypeVar("E", bound=IntEnum)
F = TypeVar("F")
Read: TypeAlias = Callable[[Any], Any]
"""Reads a table: a frame, or a part of one."""
Validate: TypeAlias = Callable[[Ragged], dict[int, str]]
"""Returns index → sentence for bad items."""

MAX_INT64 = 2**63 - 1
MAX_CURSOR_BYTES = 4096
MAX_SETTINGS = 256
MAX_SETTING_BYTES = 1024
MAX_STEPS = 10_000
KNOWN_KIND = TopicSettings().kind
_KNOWN_MARKS = 7
_FEW = 32
"""Up to here plain Python is quicker than a handful of numpy calls."""
_UBYTE, _UINT, _LONG = DTYPES["[ubyte]"], DTYPES["[uint]"], DTYPES["[long]"]
TIME = Range(0, MAX_TIME_MS)
_STATUSES = bytes(status.code for status in Status)
_STATES = tuple(State)
_WHOLE, _FLAG, _TEXT = (layout.ENUMS["SettingKind"][kind] for kind in ("WHOLE", "FLAG", "TEXT"))
SETTING_COLUMNS = [
    name for name, kind, *_ in layout.TABLES["TopicList"] if kind == "[long]" and hasattr(TopicSettings, name)
]
"""The settings that are whole numbers, as TopicList has them."""


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that `data` is. Its columns are views of `data`: do not change it while they are used.

    Raise WireError with the reason, or WireVersionError for another major. Raise UnknownFrame for a kind of frame that
    only a newer minor knows; streams skip it.
    """
    body = Body(*find_body(data))
    frame: Frame = _READERS[body.name](body)
    return frame


def decode_as(data: bytes | bytearray | memoryview, kind: type[F]) -> F:
    """Return the frame that `data` is, which must be a `kind`. Raise like `decode`, and WireError for any other."""
    frame = decode(data)
    if not isinstance(frame, kind):
        raise WireError(f"a {type(frame).__name__} frame came where a {kind.__name__} was expected")
    return frame


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Its columns must have equal lengths; sentences are cut at 1 KiB.

    Raise TooLarge when it would exceed MAX_FRAME_BYTES, WireError when a value does not fit its field.
    """
    name = type(frame).__name__
    if name not in _KINDS:
        raise WireError(f"{name} is no frame")
    writer = _Writer()
    try:
        body = writer.table(name, frame)
    except (StructError, UnicodeEncodeError, OverflowError) as bad:
        raise WireError(f"a {name} frame cannot carry these values: {bad}") from bad
    if writer.end > MAX_FRAME_BYTES:
        raise TooLarge(
            f"a frame may take {MAX_FRAME_BYTES} bytes, this one would take {writer.end}: send fewer messages"
        )
    # The root's vtable: its size, the root's size, then where major, minor, kind and body lie in the root.
    writer.parts[0] = _ROOT(20, layout.IDENTIFIER, 12, 13, 8, 10, 12, 4, 12, body - 24, MAJOR, MINOR, _KINDS[name])
    return b"".join(writer.parts)


# ── reading ──


class Body(Table):
    """The body of a frame, or a table in it. Its methods read one field each, and refuse values out of range."""

    __slots__ = ()

    # -- single values ---------------------------------------------------------------------------------------------

    def reading(self, field: str) -> float:
        """A clock reading with its fraction."""
        value = self.real(field)
        if not 0 <= value <= MAX_TIME_MS:
            raise self.refusal(field, f"is {value}; a clock reads 0 to {MAX_TIME_MS}")
        return value

    def difference(self, field: str) -> float:
        """The difference of two clocks, either way."""
        value = self.real(field)
        if not abs(value) <= MAX_TIME_MS:
            raise self.refusal(field, f"is {value}; clocks are apart by {MAX_TIME_MS} at most")
        return value

    def one_of(self, field: str, kind: type[E], allowed: Collection[int] = ()) -> E:
        """A member of `kind`, among `allowed` if there are any."""
        value = self.whole(field)
        if value not in (allowed := allowed or tuple(kind)):
            raise self.refusal(field, f"is {value}; allowed are {', '.join(str(int(each)) for each in allowed)}")
        return kind(value)

    def leaving_reason(self, field: str) -> LeavingReason:
        if self.lenient and self.whole(field) not in tuple(LeavingReason):
            return LeavingReason.DRAINING
        return self.one_of(field, LeavingReason)

    def topic(self, field: str) -> str:
        name = self.text(field)
        try:
            return check_topic_name(name)
        except Invalid as bad:
            raise self.refusal(field, f"is no topic's name: {bad.reason}") from None

    def optional_topic(self, field: str) -> str:
        """A topic's name, or empty for none."""
        return self.topic(field) if self.text(field) else ""

    def optional_name(self, field: str) -> str:
        """A holder's name, or empty for none."""
        return self.name_of(field) if self.text(field) else ""

    def name_of(self, field: str) -> str:
        """A group's or a consumer's name."""
        name = self.text(field)
        if not 1 <= len(name.encode()) <= MAX_GROUP_BYTES or "\0" in name:
            raise self.refusal(field, f"is 1 to {MAX_GROUP_BYTES} bytes of UTF-8 without NUL, not {name!r:.80}")
        return name

    def sentence(self, field: str) -> str:
        said = self.text(field)
        if len(said) > MAX_REASON_BYTES or len(said.encode()) > MAX_REASON_BYTES:
            raise self.refusal(field, f"takes up to {MAX_REASON_BYTES} bytes")
        return said

    def bytes_of(self, field: str, most: int) -> bytes:
        blob = self.blob(field)
        if blob is None:
            return b""
        if len(blob) > most:
            raise self.refusal(field, f"takes up to {most} bytes, not {len(blob)}")
        return bytes(blob)

    def cursor(self, field: str) -> bytes:
        return self.bytes_of(field, MAX_CURSOR_BYTES)

    def optional_id(self, field: str) -> bytes:
        """An id, or empty for none."""
        id = self.bytes_of(field, MAX_ID_BYTES)
        for sentence in validate_texts(Ragged.of([id]), ID_TEXT).values() if id else ():
            raise self.refusal(field, sentence)
        return id

    def states(self, field: str) -> tuple[State, ...]:
        """States, each once."""
        states = self.bytes_of(field, len(_STATES))
        if len(set(states)) < len(states) or any(state >= len(_STATES) for state in states):
            raise self.refusal(field, f"takes each of 0 to {len(_STATES) - 1} once")
        return tuple(_STATES[state] for state in states)

    def tag(self, field: str, least: int = 0) -> bytes:
        tag = self.bytes_of(field, MAX_TAG_BYTES)
        if len(tag) < least or not is_utf8(tag):
            raise self.refusal(field, f"is {least} to {MAX_TAG_BYTES} bytes of UTF-8")
        return tag

    def table(self, field: str, name: str, read: Read) -> Any:
        """Return what `read` makes of the table `name` that `field` refers to; it must be there."""
        at = self.target(field)
        if at is None:
            raise self.refusal(field, "is missing")
        return read(Body(name, self.data, at, self.lenient))

    # -- columns ---------------------------------------------------------------------------------------------------

    def _agree(self, field: str, count: int) -> None:
        """The first column sets the number of messages. All others must agree."""
        if count == self.count:
            return
        if self.count >= 0:
            raise self.refusal(field, f"has {count} items where {self.count} are expected")
        if count > MAX_BATCH:
            raise self.refusal(field, f"has {count} items; a frame carries up to {MAX_BATCH}")
        self.count = count

    def strings(self, field: str, check: Text | Validate | None = None, optional: bool = False) -> Ragged:
        """A column of byte strings that pass `check`. If `optional`, None for a column that is missing."""
        offsets = self.vector(field + "_offsets", _UINT)
        blob = self.blob(field)
        last = 0 if blob is None else len(blob)
        if offsets is None or not len(offsets):
            if last:
                raise self.refusal(field, "has bytes but no offsets")
            if optional and offsets is None:
                return None  # type: ignore[return-value]
            offsets = np.zeros(1, np.uint32)
        self._agree(field, len(offsets) - 1)
        if len(offsets) <= _FEW:
            marks = offsets.tolist()
            sound = marks[0] == 0 and marks[-1] == last and marks == sorted(marks)
        else:
            sound = int(offsets[0]) == 0 and int(offsets[-1]) == last and bool((offsets[1:] >= offsets[:-1]).all())
        if not sound:
            raise self.refusal(field, f"has offsets that do not lead, never decreasing, from 0 to {last}")
        column = Ragged(b"" if blob is None else blob, offsets)
        if check is not None:
            bad = validate_texts(column, check) if isinstance(check, Text) else check(column)
            for index, sentence in bad.items():
                raise self.refusal(field, f"is bad at {index}: {sentence}")
        return column

    def headers(self, field: str) -> Ragged | None:
        """A column of encoded headers; None for a column that is missing."""
        return self.strings(field, validate_headers, optional=True)

    def topic_names(self, field: str) -> Ragged:
        """A column of topics' names."""
        return self.strings(field, _validate_topic_names)

    def addresses(self, field: str) -> tuple[str, ...]:
        """Where brokers are: a column by itself."""
        return tuple(address.decode() for address in self.strings(field, Text("an address", 1, 1024)))

    def sentences(self, field: str) -> tuple[str, ...]:
        """Sentences: a column by itself."""
        return tuple(said.decode() for said in self.strings(field, REASON_TEXT))

    def numbers(
        self, field: str, dtype: np.dtype[Any], limit: Range | None = None, optional: bool = False
    ) -> npt.NDArray[Any]:
        """A column of numbers within `limit`. If `optional`, None for a column that is missing."""
        column = self.vector(field, dtype)
        if column is None:
            if optional:
                return None  # type: ignore[return-value]
            column = np.zeros(0, dtype)
        self._agree(field, len(column))
        if limit is not None and not within(column, limit.least, limit.most):
            raise self.refusal(field, f"has a value outside {limit.least} to {limit.most}")
        return column

    def among(self, field: str, allowed: bytes) -> UInt8:
        """A column of bytes that are among `allowed`."""
        column = self.numbers(field, _UBYTE)
        if strange := column.tobytes().translate(None, allowed):
            raise self.refusal(field, f"has a value of {strange[0]}; allowed are {', '.join(map(str, allowed))}")
        return column

    def codes(self, field: str, kind: type[IntEnum], unknown: IntEnum) -> UInt8:
        """A column of numbers of `kind`. Others are refused; in a frame of a newer minor they read as `unknown`."""
        column = self.numbers(field, _UBYTE)
        beyond = column >= len(kind)
        if beyond.any():
            if not self.lenient:
                raise self.refusal(field, f"has a value above {len(kind) - 1}")
            column = np.where(beyond, np.uint8(unknown), column)
        return column

    def flags(self, field: str, known: int) -> UInt8:
        """A column of flags. Unknown bits are refused; in a frame of a newer minor they are masked off."""
        if self.lenient:
            masked: UInt8 = self.numbers(field, _UBYTE) & np.uint8(known)
            return masked
        return self.among(field, _BELOW[known])


_BELOW = {known: bytes(range(known + 1)) for known in (1, 3, 7, 15)}


def _validate_topic_names(names: Ragged) -> dict[int, str]:
    bad = validate_texts(names, Text("a topic's name", 1, 4 * MAX_TOPIC_CHARS))
    if bad:
        return bad
    refused: dict[bytes, str] = {}
    for name in set(names):
        try:
            check_topic_name(name.decode())
        except Invalid as why:
            refused[name] = why.reason
    return {index: refused[name] for index, name in enumerate(names) if name in refused} if refused else {}


# ── fields ──


_SCALARS = {bool: "flag", float: "real", str: "text"}
_VECTORS = {np.int64: DTYPES["[long]"], np.uint64: DTYPES["[ulong]"], np.uint32: _UINT, np.uint8: _UBYTE}


def _step(field: Field) -> tuple[str, tuple[Any, ...]]:
    """Return the method of Body that reads a field, and its arguments after the field's name."""
    limit = field.limit
    if isinstance(limit, Form):
        return limit.name, limit.arguments
    if field.kind == "strings":
        return "strings", (limit, field.optional)
    if field.dtype is not None:
        return "numbers", (_VECTORS[field.dtype], limit, field.optional)
    if field.type is int:
        return "whole", (limit.least, limit.most) if isinstance(limit, Range) else ()
    if field.type in _SCALARS:
        return _SCALARS[field.type], ()
    return "table", (field.type.__name__, _reader(field.type))


def _reader(kind: type) -> Read:
    """Return what reads a table into a `kind`: one expression with a call for each field, as a person would write it.
    A loop over the fields takes 15 % longer."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    names: dict[str, Any] = {"kind": kind}
    calls = []
    for field in fields_of(kind):
        method, arguments = _step(field)
        given = {f"{field.name}_{at}": argument for at, argument in enumerate(arguments)}
        names |= given
        calls.append(f"body.{method}({', '.join((repr(field.name), *given))})")
    read: Read = eval(f"lambda body: kind({', '.join(calls)})", names)
    return read


# ── frames that lie otherwise in bytes ──


def _read_answers(part: Body) -> Answers:
    status = part.numbers("status", _UBYTE)
    if status.tobytes().translate(None, _STATUSES):
        status = np.where(status < len(_STATUSES), status, np.uint8(Status.UNKNOWN.code))
    one, count = np.uint8(1), len(status)
    marks = part.flags("marks", _KNOWN_MARKS) if "marks" in part.places else np.zeros(count, np.uint8)
    return Answers(
        status=status,
        version=part.numbers("version", _LONG, Range(0)),
        due_ms=part.numbers("due_ms", _LONG, TIME),
        settled=marks & one,
        late=marks >> one & one,
        repeat=marks >> np.uint8(2),
        details=_read_details(part, count) if "detail_at" in part.places else {},
    )


def _read_details(part: Body, count: int) -> dict[int, str]:
    part.count = -1
    at = part.numbers("detail_at", _UINT).tolist()
    said = part.sentences("details")
    if at and (at[-1] >= count or any(high <= low for low, high in pairwise(at))):
        raise part.refusal("detail_at", f"must ascend below {count}")
    return dict(zip(at, said, strict=True))


def _write_answers(answers: Answers) -> dict[str, Any]:
    settled, late, repeat = answers.settled, answers.late, answers.repeat
    marks = None
    if any(b"\1" in column.tobytes() for column in (settled, late, repeat)):
        marks = settled.astype(np.uint8) | late.astype(np.uint8) << 1 | repeat.astype(np.uint8) << 2
    at = sorted(answers.details)
    return {
        "status": answers.status,
        "version": answers.version,
        "due_ms": answers.due_ms,
        "marks": marks,
        "detail_at": np.array(at, np.uint32) if at else None,
        "details": _strings([_cut(answers.details[index]) for index in at]) if at else None,
    }


def _read_tag_mutated(body: Body) -> TagMutated:
    status = body.numbers("status", _UBYTE).tolist()
    counts = dict(zip(status, body.numbers("count", _LONG, Range(0)).tolist(), strict=True))
    if len(counts) < len(status):
        raise body.refusal("status", "names a status twice")
    times = (body.whole(name, 0, MAX_TIME_MS) for name in ("started_ms", "at_ms"))
    return TagMutated(counts, body.cursor("cursor"), *times)


def _write_tag_mutated(frame: TagMutated) -> dict[str, Any]:
    return {
        "status": bytes(frame.counts),
        "count": np.fromiter(frame.counts.values(), np.int64, len(frame.counts)),
        "cursor": frame.cursor,
        "started_ms": frame.started_ms,
        "at_ms": frame.at_ms,
    }


def _read_forecast(body: Body) -> Forecast:
    window_ms, step_ms = (body.whole(name, 1, MAX_DURATION_MS) for name in ("window_ms", "step_ms"))
    if -(-window_ms // step_ms) > MAX_STEPS:
        raise body.refusal("step_ms", f"of {step_ms} makes more than {MAX_STEPS} steps of the window")
    return Forecast(body.topic("topic"), window_ms, step_ms)


def _read_forecasted(body: Body) -> Forecasted:
    edges_ms = body.numbers("edges_ms", _LONG, TIME)
    if not 1 <= len(edges_ms) <= MAX_STEPS + 1 or bool((edges_ms[1:] < edges_ms[:-1]).any()):
        raise body.refusal("edges_ms", f"are 1 to {MAX_STEPS + 1} times that do not decrease")
    body.count -= 1
    counts, overdue = body.numbers("counts", _LONG, Range(0)), body.whole("overdue", 0, MAX_COUNT)
    return Forecasted(edges_ms, counts, overdue, body.flag("exact"))


def _read_topics(body: Body) -> Topics:
    action = body.one_of("action", TopicAction)
    name = body.text("name")
    if name or action is not TopicAction.LIST:
        name = body.topic("name")
    names = body.strings("settings", Text("a setting's name", 1, 64)).tolist()
    if len(names) > MAX_SETTINGS or len(set(names)) < len(names):
        raise body.refusal("settings", f"are up to {MAX_SETTINGS}, each once")
    kinds = body.among("kinds", b"\0\1\2").tolist()
    numbers = body.numbers("numbers", _LONG).tolist()
    texts = body.strings("texts", Text("a setting", 0, MAX_SETTING_BYTES, nul=True)).tolist()
    settings: dict[str, int | str | bool] = {}
    for setting, kind, number, text in zip(names, kinds, numbers, texts, strict=True):
        if kind == _FLAG and number not in (0, 1):
            raise body.refusal("numbers", f"has {number} for a setting that is 0 or 1")
        settings[setting.decode()] = text.decode() if kind == _TEXT else bool(number) if kind == _FLAG else number
    return Topics(action, name, settings, body.whole("revision", 0, MAX_INT64))


def _write_topics(frame: Topics) -> dict[str, Any]:
    kinds, numbers, texts = [], [], []
    for name, value in frame.settings.items():
        if not isinstance(value, int | str):
            raise WireError(f"setting {name!r} must be a whole number, true or false, or a text, not {value!r:.80}")
        kinds.append(_TEXT if isinstance(value, str) else _FLAG if isinstance(value, bool) else _WHOLE)
        numbers.append(0 if isinstance(value, str) else int(value))
        texts.append(value if isinstance(value, str) else "")
    return {
        "action": frame.action,
        "name": frame.name,
        "revision": frame.revision,
        "settings": _strings(frame.settings),
        "kinds": bytes(kinds),
        "numbers": np.array(numbers, np.int64),
        "texts": _strings(texts),
    }


def _read_topic_list(body: Body) -> TopicList:
    names = body.topic_names("names")
    columns = {name: body.numbers(name, _LONG).tolist() for name in SETTING_COLUMNS if name in body.places}
    columns["paused"] = [flag == 1 for flag in body.among("paused", b"\0\1").tolist()]
    columns["kind"] = [kind.decode() for kind in body.strings("kind", Text("kind", 1, 64))]
    urls = body.strings("push_url", Text("a URL", 0, MAX_PUSH_URL_BYTES), optional=True)
    if urls is not None:  # None: of a broker before 1.3
        columns["push_url"] = [url.decode() for url in urls]
    uids, revisions = body.numbers("uid", _LONG, Range(0)).tolist(), body.numbers("revision", _LONG, Range(1)).tolist()
    created = body.numbers("created_ms", _LONG, TIME).tolist()
    topics = []
    try:
        for index, name in enumerate(names.tolist()):
            settings = TopicSettings(**{setting: column[index] for setting, column in columns.items()})
            # In a newer minor's frame there may be kinds that are not known here: they are told of all the same.
            (replace(settings, kind=KNOWN_KIND) if body.lenient else settings).check()
            topics.append(Topic(name.decode(), uids[index], settings, revisions[index], created[index]))
    except Invalid as bad:
        raise WireError(f"TopicList has a topic out of range: {bad.reason}") from None
    secrets = Body("TopicList", body.data, body.start, body.lenient).strings("secrets", Text("a secret", 1, 256))
    told = tuple(secret.decode() for secret in secrets)
    return TopicList(body.whole("status"), body.sentence("detail"), tuple(topics), told)


def _write_topic_list(frame: TopicList) -> dict[str, Any]:
    topics = frame.topics
    columns: dict[str, Any] = {
        name: np.array([getattr(topic.settings, name) for topic in topics], np.int64) for name in SETTING_COLUMNS
    }
    for name in ("uid", "revision", "created_ms"):
        columns[name] = np.array([getattr(topic, name) for topic in topics], np.int64)
    return columns | {
        "status": frame.status,
        "detail": _cut(frame.detail),
        "names": _strings(topic.name for topic in topics),
        "paused": bytes(topic.settings.paused for topic in topics),
        "kind": _strings(topic.settings.kind for topic in topics),
        "push_url": _strings(topic.settings.push_url for topic in topics),
        "secrets": _strings(frame.secrets),
    }


def _read_schedule_answer(body: Body) -> ScheduleAnswer:
    names = [name.decode() for name in body.strings("counts", Text("a count's name", 1, 64))]
    counted = body.numbers("counted", _LONG, Range(0, MAX_COUNT)).tolist()
    if len(set(names)) < len(names):
        raise body.refusal("counts", "names a count twice")
    counts = dict(zip(names, counted, strict=True))
    said = body.sentence("detail"), body.text("body"), body.cursor("cursor")
    return ScheduleAnswer(body.whole("status"), *said, counts)


def _write_schedule_answer(frame: ScheduleAnswer) -> dict[str, Any]:
    return {
        "status": frame.status,
        "detail": _cut(frame.detail),
        "body": frame.body,
        "cursor": frame.cursor,
        "counts": _strings(frame.counts),
        "counted": np.fromiter(frame.counts.values(), np.int64, len(frame.counts)),
    }


_SPECIAL: dict[type, Read] = {
    Answers: _read_answers,
    TagMutated: _read_tag_mutated,
    Forecast: _read_forecast,
    Forecasted: _read_forecasted,
    Topics: _read_topics,
    TopicList: _read_topic_list,
    ScheduleAnswer: _read_schedule_answer,
}
_READERS = {kind.__name__: _reader(kind) for kind in get_args(Frame)}


# ── writing ──


def _cut(sentence: str) -> str:
    """Return at most MAX_REASON_BYTES of a sentence, in whole characters."""
    if len(sentence) * 4 <= MAX_REASON_BYTES:
        return sentence
    return sentence.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


def _strings(texts: Iterable[str]) -> Ragged:
    return Ragged.of([text.encode() for text in texts])


_FORMS: dict[str, Callable[[Any], Any]] = {
    "sentence": _cut,
    "sentences": lambda sentences: _strings(map(_cut, sentences)),
    "addresses": _strings,
    "states": lambda states: bytes(map(_STATES.index, states)),
}
"""Forms whose bytes differ from their Python values."""


def _adapter(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    """Return a function that makes a table's fields of a `kind`; None if they are written as they are."""
    adapted = {
        field.name: _FORMS[field.limit.name]
        for field in fields_of(kind)
        if isinstance(field.limit, Form) and field.limit.name in _FORMS
    }
    if not adapted:
        return None
    names = [field.name for field in fields_of(kind)]

    def fields(value: Any) -> dict[str, Any]:
        held = {name: getattr(value, name) for name in names}
        return held | {name: write(held[name]) for name, write in adapted.items()}

    return fields


_ADAPTED: dict[type, Callable[[Any], dict[str, Any]]] = {
    **{kind: adapt for kind in get_args(Frame) if (adapt := _adapter(kind)) is not None},
    Answers: _write_answers,
    TagMutated: _write_tag_mutated,
    Topics: _write_topics,
    TopicList: _write_topic_list,
    ScheduleAnswer: _write_schedule_answer,
}


# ── laying tables out ──

_COUNT = [Struct(f"<{padding}xI").pack for padding in range(8)]
"""A vector's length, with some padding before it."""
_RAGGED = "ragged"

_ROOT = Struct("<I4sHHHHHHiIHHB").pack
_ROOT_BYTES = 33
"""Offset of the root table, identifier, vtable (12 bytes), and root table (13 bytes, from 20 on)."""


class Arrangement:
    """The layout of the tables of one name: a vtable; then, at 4 modulo 8, the table. It begins with its soffset. The
    widest fields come first, so everything is aligned."""

    __slots__ = ("_slots", "_vtables", "fields", "pack", "size", "vtable_bytes")

    def __init__(self, table: str) -> None:
        raw = layout.TABLES[table]
        offsets = {name for name, *_ in raw if name.endswith("_offsets")}
        self.fields: list[tuple[str, str, int, int]] = []
        """(name, kind, place in the table, bit). Kind: of a scalar, a vector or a table; `string`; or `ragged`, whose
        bytes are 4 behind its offsets."""
        self._slots: list[tuple[int, int, int]] = []
        packing, at = ["<i"], 4
        arranged = sorted(raw, key=lambda field: (-WIDTHS[SCALARS.get(field[1], "I")], field[2]))
        for bit, (name, kind, slot, _) in enumerate(arranged):
            code = SCALARS.get(kind, "I")
            packing.append(code)
            self._slots.append((slot, at, bit))
            if name in offsets:
                self.fields.append((name.removesuffix("_offsets"), _RAGGED, at, bit))
            elif name + "_offsets" not in offsets:
                self.fields.append((name, kind, at, bit))
            at += WIDTHS[code]
        pack = Struct("".join(packing))
        self.pack = pack.pack
        self.size = pack.size
        self.vtable_bytes = 4 + 2 * len(raw)
        self._vtables: dict[int, bytes] = {}

    def vtable(self, absent: int) -> bytes:
        """Return the vtable of a table without the fields whose bits are in `absent`."""
        made = self._vtables.get(absent)
        if made is None:
            entries = [0] * len(self._slots)
            for slot, place, bit in self._slots:
                if not absent >> bit & 1:
                    entries[slot // 2 - 2] = place
            made = Struct(f"<HH{len(entries)}H").pack(self.vtable_bytes, self.size, *entries)
            self._vtables[absent] = made
        return made


_ARRANGEMENTS = {table: Arrangement(table) for table in layout.TABLES}
_KINDS = {name: number for number, name in layout.BODIES.items()}


class _Writer:
    """The parts of one frame so far. `end`: where the next part will lie."""

    __slots__ = ("end", "parts")

    def __init__(self) -> None:
        self.parts: list[Buffer] = [b""]
        self.end = _ROOT_BYTES

    def table(self, name: str, source: Any) -> int:
        """Write `source` as a table and everything that it refers to. Return its place. A column `x` of the table, with
        its `x_offsets`, is `x` of the source."""
        adapt = _ADAPTED.get(type(source))
        get = source.__getattribute__ if adapt is None else adapt(source).__getitem__
        arrangement = _ARRANGEMENTS[name]
        own = len(self.parts)
        self.parts.append(b"")
        room = self.end + arrangement.vtable_bytes
        padding = (4 - room) % 8
        start = room + padding
        self.end = start + arrangement.size
        values: list[int | float] = [arrangement.vtable_bytes]
        absent = 0
        for field, kind, place, bit in arrangement.fields:
            value = get(field)
            if kind in SCALARS:
                values.append(value)
            elif value is None or (kind == "string" and not value):
                if kind is _RAGGED:
                    absent |= 3 << bit
                    values.append(0)
                else:
                    absent |= 1 << bit
                values.append(0)
            elif kind is _RAGGED:
                values += self._ragged(value, start + place)
            elif kind == "string":
                text = value.encode()
                values.append(self._vector(text + b"\0", len(text), 4) - start - place)
            elif kind in DTYPES:
                values.append(self._column(value, DTYPES[kind]) - start - place)
            else:
                values.append(self.table(kind, value) - start - place)
        self.parts[own] = b"".join((bytes(padding), arrangement.vtable(absent), arrangement.pack(*values)))
        return start

    def _vector(self, data: Buffer, count: int, width: int) -> int:
        """Write a vector whose elements are aligned to `width`. Return its place."""
        padding = -(self.end + 4) % width
        at = self.end + padding
        self.parts += (_COUNT[padding](count), data)
        self.end = at + 4 + len(data)
        return at

    def _column(self, value: Any, dtype: np.dtype[Any]) -> int:
        if not isinstance(value, np.ndarray):
            return self._vector(value, len(value), 4)
        if value.dtype != dtype:
            value = value.astype(dtype)
        return self._vector(value.tobytes(), len(value), max(4, dtype.itemsize))

    def _ragged(self, column: Ragged, place: int) -> tuple[int, int]:
        offsets, data = column.offsets, column.data
        first, last = int(offsets[0]), int(offsets[-1])
        if first:
            offsets = offsets - first
        if offsets.dtype != _UINT:
            offsets = offsets.astype(_UINT)
        if first or last != len(data):
            data = memoryview(data)[first:last]
        marks = self._vector(offsets.tobytes(), len(offsets), 4) - place
        return marks, self._vector(data, last - first, 4) - place - 4
