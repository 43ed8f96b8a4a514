"""The record of a schedule, as a message of the internal topic holds it: the specification, and how far it has come.

A record never changes. A change is a record with the next number, put if that is absent: the put is the
compare-and-set between looks, edits and brokers. Only then the record before it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, NamedTuple

from timeline.errors import Invalid
from timeline.model import MAX_TAG_BYTES, MAX_TIME_MS, bucket_of
from timeline.schedules.specification import Specification

SCHEDULES_TOPIC = "~schedules"
SCHEDULES_GROUP = "~schedules"
BUCKETS = 16
"""Of the internal topic. All records of a schedule are in one of them."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_OCCURRENCE = re.compile(
    r"([A-Za-z0-9._-]{1,100})@([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{3})?)Z"
    r"(?:\.(?:[0-9]{1,19}|trigger))?"
)
_RECORD = re.compile(r"(.+)#([0-9]{1,19})\.[0-9]{1,9}")
TRIGGER = "trigger"
_MOST = 2**63 - 1


class DecidedOccurrence(NamedTuple):
    """An occurrence that was decided to be produced, and that the next look puts. `sequence`: its number, from 1."""

    at_ms: int
    sequence: int
    caught_up: bool = False


class OccurrenceKey(NamedTuple):
    """The id of an occurrence's message, and the group that it belongs to."""

    id: str
    group: str


class KeptOccurrence(NamedTuple):
    """A message of an earlier revision that an edit left on the timeline."""

    id: str
    group: str
    due_ms: int


class QueuedSpan(NamedTuple):
    """Occurrences from `from_ms` to before `until_ms`, `length` in all, of which each waits for the one before it to be
    finished. `before`: how many were decided before the first."""

    from_ms: int
    until_ms: int
    before: int
    length: int
    caught_up: bool = False


class RenamedSpan(NamedTuple):
    """Occurrences from `from_ms` to before `until_ms` whose ids an edit cancelled. A cancelled id is remembered, so
    occurrences produced there later have `.number` behind their ids."""

    from_ms: int
    until_ms: int
    number: int


@dataclass(frozen=True)
class ScheduleRecord:
    """A schedule's specification and state. Times are ms UTC; 0: none.

    `number`: of this record; the next one's is larger by one. `revision`: 1, and 1 more with each edit. `revised`: the
    number of the record with which this revision began.

    `begun_ms`: since when these rules decide. `position_ms`: the first time at which an occurrence is not decided yet.
    `sequence`: how many were decided before it. `cancelling`, `decided`: what the next look cancels, and puts.
    `queue`: what waits for its turn. `renamed`: whose ids have a number. `kept`: messages of earlier revisions that
    edits left on the timeline, until they are due. `recounted`: `sequence` counts by these rules before `begun_ms`,
    too, and not what was kept.

    `standing_until_ms`: before it, occurrences of earlier revisions may stand. `replacing`: they are replaced.

    `produced`, `caught_up`, `missed`, `skipped`, `failed`: counts of occurrences. `last_ms`, `last_id`: the occurrence
    that was put last; `last_put_ms`: when. `ended`: none follows. `deleted`: the schedule ends with this record.
    """

    specification: Specification
    number: int = 1
    revision: int = 1
    revised: int = 1
    created_ms: int = 0
    edited_ms: int = 0
    begun_ms: int = 0
    position_ms: int = 0
    sequence: int = 0
    decided: tuple[DecidedOccurrence, ...] = ()
    cancelling: tuple[OccurrenceKey, ...] = ()
    queue: tuple[QueuedSpan, ...] = ()
    renamed: tuple[RenamedSpan, ...] = ()
    kept: tuple[KeptOccurrence, ...] = ()
    recounted: bool = False
    standing_until_ms: int = 0
    replacing: bool = False
    produced: int = 0
    caught_up: int = 0
    missed: int = 0
    skipped: int = 0
    failed: int = 0
    last_ms: int = 0
    last_id: str = ""
    last_put_ms: int = 0
    ended: bool = False
    deleted: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            least = 1 if name in ("number", "revision", "revised") else 0
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                raise Invalid(f"{name} of a schedule's record must be a whole number from {least}, not {value!r:.80}")
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise Invalid(f"{name} of a schedule's record must be text, not {getattr(self, name)!r:.80}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise Invalid(f"{name} of a schedule's record must be true or false, not {getattr(self, name)!r:.80}")

    @property
    def id(self) -> str:
        """The id of its message."""
        return record_id(self.specification.topic, self.specification.name, self.number)

    def neighbour_id(self, by: int) -> str:
        """Return the id of the record whose number is larger by `by`."""
        return record_id(self.specification.topic, self.specification.name, self.number + by)

    @property
    def tag(self) -> str:
        """The tag of its message, which all records of the schedule have."""
        return tag_of(self.specification.topic, self.specification.name)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON shows it: all fields but the specification, the number and the revision."""
        shown: dict[str, Any] = {name: getattr(self, name) for name in _STATE}
        return shown | {name: [list(one) for one in getattr(self, name)] for name in _ROWS}

    def encode(self) -> bytes:
        """Return it as its message's payload."""
        said = {
            "specification": self.specification.to_json(),
            "number": self.number,
            "revision": self.revision,
            # Older brokers do not know these.
            "state": {name: value for name, value in self.state().items() if value or name not in _NEW},
        }
        return json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> ScheduleRecord:
        """Return the record that `encode` made `payload` of. Raise Invalid for anything else."""
        try:
            said = json.loads(bytes(payload))
        except (ValueError, RecursionError):
            raise Invalid("a schedule's record must be JSON") from None
        fields = {"specification", "number", "revision", "state"}
        if not isinstance(said, dict) or said.keys() != fields or not isinstance(said["state"], dict):
            raise Invalid(f"a schedule's record must have the fields {', '.join(sorted(fields))}")
        state = said["state"]
        if unknown := state.keys() - _STATE:
            raise Invalid(f"a schedule's record has no field {min(unknown)!r:.80}: a newer broker may have written it")
        rows = {name: tuple(_row(name, kind, one) for one in state.get(name, ())) for name, kind in _ROWS.items()}
        return cls(Specification.from_json(said["specification"]), said["number"], said["revision"], **state | rows)

    def occurrence_id(self, at_ms: int) -> str:
        """Return the id of the message of its occurrence at a time."""
        number = 0
        for span in self.renamed:
            if span.from_ms <= at_ms < span.until_ms:
                number = max(number, span.number)
        return occurrence_id(self.specification.name, at_ms, str(number) if number else "")

    def kept_after(self, now_ms: int) -> dict[int, KeptOccurrence]:
        """Return the kept messages that are due after now, by the times of their occurrences."""
        later = ((schedule_of(one.id), one) for one in self.kept if one.due_ms > now_ms)
        return {found[1]: one for found, one in later if found is not None}

    def keeping(self, at_ms: int, id: str) -> ScheduleRecord:
        """Return the record in which the occurrence at a time has this id, which it had before it was renamed."""
        suffix = id.rpartition("Z.")[2]
        number = int(suffix) if suffix.isdecimal() else 0
        spans: list[RenamedSpan] = []
        for span in self.renamed:
            if span.from_ms <= at_ms < span.until_ms and span.number > number:
                parts = span._replace(until_ms=at_ms), span._replace(from_ms=at_ms + 1)
                spans += [part for part in parts if part.from_ms < part.until_ms]
            else:
                spans.append(span)
        return dataclasses.replace(self, renamed=tuple(spans))


_ROWS: dict[str, Any] = {
    "cancelling": OccurrenceKey,
    "decided": DecidedOccurrence,
    "queue": QueuedSpan,
    "renamed": RenamedSpan,
    "kept": KeptOccurrence,
}
_FLAGS = ("replacing", "recounted", "ended", "deleted")
_NEW = ("kept", "recounted")
_TEXTS = ("last_id",)
_STATE = tuple(
    one.name for one in dataclasses.fields(ScheduleRecord) if one.name not in ("specification", "number", "revision")
)
_NUMBERS = ("number", "revision", *(name for name in _STATE if name not in {*_ROWS, *_FLAGS, *_TEXTS}))


def _row(name: str, kind: Any, said: object) -> Any:
    wanted = [str if field in ("id", "group") else int for field in kind._fields]
    try:
        if isinstance(said, list) and all(isinstance(one, of) for one, of in zip(said, wanted, strict=False)):
            return kind(*said)
    except TypeError:  # too few, or too many
        pass
    raise Invalid(f"{name} of a schedule's record must have lists of {', '.join(kind._fields)}, not {said!r:.80}")


STATUSES = ("active", "waiting", "paused", "ended")


def status_of(paused: bool, waiting: bool, ended: bool, position_ms: int, now_ms: int) -> str:
    """Return a schedule's status, one of `STATUSES`. It ends when the time of its last occurrence is over, though that
    was decided before."""
    if paused:
        return "paused"
    if waiting:
        return "waiting"
    return "ended" if ended and position_ms <= now_ms else "active"


def record_id(topic: str, name: str, number: int) -> str:
    """Return the id of a schedule's record: `TOPIC/NAME#NUMBER.K`.

    The least `K` is taken that puts it in the bucket of the schedule. So one broker has all records of a schedule. And
    as a walk goes by bucket and id, it meets at least one of them, whatever changes meanwhile.
    """
    key = f"{topic}/{name}"
    bucket = bucket_of(key.encode(), BUCKETS)
    numbered = f"{key}#{number}."
    begun = zlib.crc32(numbered.encode())
    return next(f"{numbered}{k}" for k in count() if zlib.crc32(str(k).encode(), begun) % BUCKETS == bucket)


def number_of(id: str, topic: str, name: str) -> int:
    """Return the number of the schedule's record that has this id. 0: it is no record of this schedule."""
    match = _RECORD.fullmatch(id)
    return int(match[2]) if match and match[1] == f"{topic}/{name}" else 0


def tag_of(topic: str, name: str) -> str:
    """Return the tag of all records of a schedule: `TOPIC/NAME`, or a hash of it where that is too long for a tag."""
    key = f"{topic}/{name}"
    if len(key.encode()) <= MAX_TAG_BYTES and not key.startswith("#"):
        return key
    return f"#{hashlib.blake2b(key.encode(), digest_size=30).hexdigest()}"


def shown_time(at_ms: int) -> str:
    """Return a time as ids have it: `2026-11-01T05:30:00Z`, with milliseconds if there are any."""
    when = _EPOCH + at_ms * _MS
    return f"{when.replace(tzinfo=None).isoformat(timespec='milliseconds' if at_ms % 1000 else 'seconds')}Z"


def occurrence_id(name: str, at_ms: int, suffix: str = "") -> str:
    """Return the id of an occurrence's message. `suffix`: what stands behind the time, after a dot."""
    return f"{name}@{shown_time(at_ms)}{f'.{suffix}' if suffix else ''}"


def schedule_of(id: str) -> tuple[str, int] | None:
    """Return the schedule's name and the time of the occurrence whose message has this id. None: it has the form of no
    such id."""
    match = _OCCURRENCE.fullmatch(id)
    if match is None:
        return None
    try:
        when = datetime.fromisoformat(match[2]).replace(tzinfo=UTC)
    except ValueError:
        return None
    at_ms = (when - _EPOCH) // _MS
    return (match[1], at_ms) if 0 <= at_ms <= MAX_TIME_MS else None


def birth_of(id: str, number: int) -> int:
    """Return the birth of an occurrence's message, never 0. It follows from the id and from the number with which the
    revision began, so a repeated look puts the same message."""
    digest = hashlib.blake2b(f"{number}/{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
