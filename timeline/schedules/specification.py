"""The specification of a schedule: when it recurs, the template of its messages, and how it treats what was missed."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from timeline.errors import FIXED_LIMIT, Invalid, TooLarge
from timeline.model import (
    DEFAULT_GROUP,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_HEADERS_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    check_topic_name,
    encode_headers,
)
from timeline.recurrence import FoldPolicy, GapPolicy, Recurrence, rules_are_readable
from timeline.recurrence.rules import MOST_COUNT
from timeline.wording import out_of_range

INTERNAL_PREFIX = "~"
"""How the names of internal topics begin."""
SCHEDULE_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
MOST_KEY_BYTES = 230
"""Of `TOPIC/NAME`, so that it and a number fit into a message's id."""
MOST_TEMPLATE_BYTES = 1024 * 1024
"""Of a schedule's payload: its record holds it."""
MOST_JITTER_MS = 86_400_000
MOST_WINDOW_MS = 366 * 86_400_000
MOST_TEXT = 1_000
"""Characters of one rule, and how many rules or exclusions a field may have."""
DEFAULT_WINDOW_MS = 3_600_000


class CatchUp(StrEnum):
    """Which of the occurrences that were missed are produced afterwards: none, the latest one, or all in the window."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"


class Overlap(StrEnum):
    """An occurrence while the one before it is unfinished: it is produced, left out, or waits."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"


TIMING = ("cron", "every_ms", "rrule", "exclude", "start_ms", "end_ms", "count", "zone", "gap", "fold")
"""The fields that say when a schedule recurs."""
_LISTS = ("cron", "rrule", "exclude")
_RANGES = {
    "every_ms": (0, MAX_DURATION_MS),
    "start_ms": (0, MAX_TIME_MS),
    "end_ms": (0, MAX_TIME_MS),
    "count": (0, MOST_COUNT),
    "jitter_ms": (0, MOST_JITTER_MS),
    "window_ms": (0, MOST_WINDOW_MS),
    "expires_ms": (0, MAX_DURATION_MS),
}
_CHOICES: Mapping[str, type[StrEnum]] = {
    "gap": GapPolicy,
    "fold": FoldPolicy,
    "catch_up": CatchUp,
    "overlap": Overlap,
}


@dataclass(frozen=True)
class Specification:
    """A schedule as its owner asked for it. Texts of rules are as in `Recurrence`.

    `jitter_ms`: each occurrence is due up to so much later, always by the same length. `catch_up`, `window_ms`: which
    missed occurrences are produced, if they are not older than the window. `payload`, `headers`, `tag`, `group`,
    `expires_ms` (from the due time on; 0: never): of each message. `{occurrence}` and `{sequence}` in text of the
    payload and in values of headers stand for its time and its number.

    Raise Invalid or TooLarge, which names the field and says what would be right. Where the packages that read rules
    are not installed, as in programs with the driver alone, rules are left for the broker to check.
    """

    topic: str
    name: str
    cron: tuple[str, ...] = ()
    every_ms: int = 0
    rrule: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    start_ms: int = 0
    end_ms: int = 0
    count: int = 0
    zone: str = "UTC"
    gap: GapPolicy | None = None
    fold: FoldPolicy | None = None
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.LATEST
    window_ms: int = DEFAULT_WINDOW_MS
    overlap: Overlap = Overlap.ALLOW
    payload: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    group: str = DEFAULT_GROUP
    expires_ms: int = 0
    paused: bool = False

    def __repr__(self) -> str:
        plain = ((one.name, one.default, getattr(self, one.name)) for one in dataclasses.fields(self)[2:])
        told = [f"{name}={value!r:.80}" for name, default, value in plain if value and value != default]
        return f"Specification({', '.join([repr(self.topic), repr(self.name), *told])})"

    def __post_init__(self) -> None:
        check_target(self.topic, self.name)
        for name in _LISTS:
            self._set(name, _texts(name, getattr(self, name)))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise Invalid(out_of_range(name, low, high, value))
        for name, kind in _CHOICES.items():
            self._set(name, _choice(name, kind, getattr(self, name)))
        if not isinstance(self.zone, str):
            raise Invalid(f"zone must be a name like 'Europe/Berlin', not {self.zone!r:.80}")
        if not isinstance(self.paused, bool):
            raise Invalid(f"paused must be true or false, not {self.paused!r:.80}")
        self._check_template()
        if rules_are_readable():
            _ = self.recurrence

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_template(self) -> None:
        if not isinstance(self.payload, bytes):
            raise Invalid(f"payload must be bytes, not {type(self.payload).__name__}")
        if len(self.payload) > MOST_TEMPLATE_BYTES:
            said = f"payload takes {len(self.payload)} bytes; a schedule's may take {MOST_TEMPLATE_BYTES}"
            raise TooLarge(said, advice=FIXED_LIMIT)
        if not isinstance(self.headers, Mapping):
            raise Invalid(f"headers are strings by strings, not {type(self.headers).__name__}")
        self._set("headers", dict(self.headers))
        size = len(encode_headers(dict(self.headers)))
        if size > MAX_HEADERS_BYTES:
            raise TooLarge(f"headers take {size} bytes; they may take {MAX_HEADERS_BYTES}", advice=FIXED_LIMIT)
        for name, least, most in (("tag", 0, MAX_TAG_BYTES), ("group", 1, MAX_GROUP_BYTES)):
            text = getattr(self, name)
            if not isinstance(text, str) or not least <= _size(text) <= most or (name == "group" and "\0" in text):
                raise Invalid(f"{name} must be text of {least} to {most} bytes of UTF-8, not {text!r:.80}")

    @property
    def recurrence(self) -> Recurrence:
        """When it recurs. Raise Invalid for a rule that is wrong, and where no rule can be read."""
        return _recurrence(*(getattr(self, name) for name in TIMING))

    @property
    def key(self) -> str:
        """`TOPIC/NAME`."""
        return f"{self.topic}/{self.name}"

    def words(self) -> str:
        """Return its rules in English."""
        return self.recurrence.words()

    def changed(self, **fields: Any) -> Specification:
        """Return it with other values of some fields. Raise Invalid for a field that there is not, for the topic and
        for the name."""
        for name in fields:
            if name in ("topic", "name"):
                raise Invalid(f"the {name} of a schedule cannot be changed: delete it, and create another one")
            if name not in FIELDS:
                raise _no_such_field(name)
        return dataclasses.replace(self, **fields)

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name: times and durations as numbers, the payload in base64, no choice as null."""
        shown = {name: getattr(self, name) for name in FIELDS}
        shown |= {name: list(shown[name]) for name in _LISTS}
        shown |= {name: None if shown[name] is None else str(shown[name]) for name in _CHOICES}
        return shown | {"payload": base64.b64encode(self.payload).decode(), "headers": dict(self.headers)}

    @classmethod
    def from_json(cls, shown: object) -> Specification:
        """Return the specification of which `to_json` made `shown`. Fields with defaults may be left out. Raise Invalid
        for anything else."""
        fields = fields_of_json(shown)
        for name in ("topic", "name"):
            if name not in fields:
                raise Invalid(f"a schedule needs a {name}")
        return cls(**fields)


FIELDS = tuple(one.name for one in dataclasses.fields(Specification))


def fields_of_json(shown: object) -> dict[str, Any]:
    """Return some fields of a specification, as `Specification` and `changed` take them, from how `to_json` shows them.
    Raise Invalid for fields that there are not."""
    if not isinstance(shown, dict):
        raise Invalid(f"a schedule is an object of JSON with fields like cron and payload, not {shown!r:.80}")
    for name in shown:
        if name not in FIELDS:
            raise _no_such_field(name)
    fields = dict(shown)
    if "payload" in fields:
        try:
            fields["payload"] = base64.b64decode(fields["payload"], validate=True)
        except (ValueError, TypeError):
            raise Invalid(f"payload must be text in base64, not {fields['payload']!r:.80}") from None
    return fields


def check_schedule_name(name: object) -> str:
    """Return `name` if a schedule may be called so, else raise Invalid."""
    if not isinstance(name, str) or not SCHEDULE_NAME.fullmatch(name) or name in (".", ".."):
        raise Invalid(f"a schedule's name is 1 to 100 letters, digits, '.', '_' and '-', not {name!r:.120}")
    return name


def check_target(topic: object, name: object) -> None:
    """Raise Invalid unless a schedule of this name may produce into a topic of this name."""
    check_schedule_name(name)
    if check_topic_name(topic).startswith(INTERNAL_PREFIX):  # type: ignore[arg-type]
        raise Invalid(f"{topic!r:.80} is an internal topic: a schedule produces into one of your own")
    if (size := _size(f"{topic}/{name}")) > MOST_KEY_BYTES:
        said = f"the names of topic and schedule may take {MOST_KEY_BYTES - 1} bytes together, not {size - 1}"
        raise Invalid(f"{said}: give the schedule a shorter name")


@lru_cache(maxsize=4_096)
def _recurrence(
    cron: tuple[str, ...],
    every_ms: int,
    rrule: tuple[str, ...],
    exclude: tuple[str, ...],
    start_ms: int,
    end_ms: int,
    count: int,
    zone: str,
    gap: GapPolicy | None,
    fold: FoldPolicy | None,
) -> Recurrence:
    """Return the recurrence, made once: each look at a schedule asks for it."""
    return Recurrence(cron, every_ms, rrule, exclude, start_ms, end_ms, count, zone, gap, fold)


def _no_such_field(name: object) -> Invalid:
    return Invalid(f"a schedule has no field {name!r:.80}. Its fields are {', '.join(FIELDS)}")


def _size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise Invalid(f"{text!r:.80} holds half of a surrogate pair, which UTF-8 cannot carry") from None


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return one text or several as several."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not all(isinstance(one, str) for one in texts):
        raise Invalid(f"{name} must be a text or a list of texts, not {value!r:.80}")
    if len(texts) > MOST_TEXT or any(len(one) > MOST_TEXT for one in texts):
        raise Invalid(f"{name} may have {MOST_TEXT} texts of {MOST_TEXT} characters")
    return tuple(texts)


Choice = TypeVar("Choice", bound=StrEnum)


def _choice(name: str, kind: type[Choice], value: object) -> Choice | None:
    if value is None and name in ("gap", "fold"):
        return None
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise Invalid(f"{name} must be {', '.join(kind)}, not {value!r:.80}") from None
