"""The options of the data source, read once and checked: what is out of range or mistyped is said before anything runs.

Names are those of the driver in Spark's way of writing (`ifExists` for `if_exists`); case and underscores do not count.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from timeline.driver.message import encode_tag, encode_text
from timeline.driver.queries import STATES
from timeline.driver.times import duration_ms
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, parse_addresses
from timeline.errors import Invalid
from timeline.model import DEFAULT_GROUP, MAX_BUCKETS, MAX_GROUP_BYTES, State, check_topic_name

ADDRESS_VARIABLE = "TIMELINE_ADDRESS"
LIVING = (State.WAITING, State.AVAILABLE, State.LEASED)
PAST = ("reject", "now")
MAX_PARTITIONS = 4096
MAX_ROWS = 50_000
"""Rows that one partition of a micro-batch may hold: as many leases as one Hello could name."""

_NAMES = {
    "addresses": "host:port of the brokers, comma-separated",
    "topic": "the topic",
    "timeout": "how long a call may take",
    "group": "write: the producer group that owns the messages",
    "ifExists": "write: 'move' moves a message that is there, 'replace' replaces it",
    "allowIdentical": "write: identical rows without an id collapse into one",
    "past": "write: 'reject' or 'now', for rows that are due already; a time in ms: reject what is due by then",
    "maxRejects": "write: how many rows may be rejected before the job fails",
    "rejectsPath": "write: a folder or bucket for rejected rows",
    "reportPath": "write: a JSON file with the counts",
    "run": "write: the same name again recognises what an earlier try has put",
    "state": "read: waiting, available, leased, dead, several with commas, or all",
    "tag": "read: only messages of this tag",
    "payload": "read: with payload and headers",
    "partitions": "read: how many tasks",
    "buckets": "read: only the buckets from A to before B, as A-B",
    "lease": "stream read: how long a micro-batch has, extended while it works",
    "maxRowsPerBatch": "stream read: rows of one micro-batch",
    "wait": "stream read: how long to look for what is due before Spark is told that there is nothing",
}
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_KNOWN = {_plain(name): name for name in _NAMES}


@dataclass(frozen=True)
class SourceOptions:
    """What a person asked of the source. Durations in ms; `addresses` as the driver takes them."""

    addresses: str
    topic: str
    timeout_ms: int = 60_000
    group: str = DEFAULT_GROUP
    if_exists: str = ""
    allow_identical: bool = False
    past: str = ""
    max_rejects: int = 0
    rejects_path: str = ""
    report_path: str = ""
    run: str = ""
    states: tuple[State, ...] = LIVING
    tag: str = ""
    payload: bool = False
    partitions: int = 4
    buckets: tuple[int, int] | None = None
    lease_ms: int = 0
    max_rows_per_batch: int = 20_000
    wait_ms: int = 1_000
    given: frozenset[str] = field(default_factory=frozenset)
    """The names that were said."""

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> SourceOptions:
        """The options out of Spark's. Raises Invalid, which names the option."""
        said: dict[str, str] = {}
        for name, value in asked.items():
            known = _KNOWN.get(_plain(name))
            if known is not None:
                said[known] = value
            elif name.lower() not in _SPARKS_OWN:
                near = difflib.get_close_matches(_plain(name), _KNOWN, n=1)
                hint = f": did you mean {_KNOWN[near[0]]}?" if near else f"; there are {', '.join(_NAMES)}"
                raise Invalid(f"the source 'timeline' has no option {name!r}{hint}")
        return cls._read(said)

    @classmethod
    def _read(cls, said: dict[str, str]) -> SourceOptions:
        if not said.get("topic"):
            raise Invalid("say which topic: .option('topic', 'reminders')")
        addresses = said.get("addresses") or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        parse_addresses(addresses)
        partitions = _whole(said, "partitions", 4, 1, MAX_PARTITIONS)
        return cls(
            addresses=addresses,
            topic=check_topic_name(said["topic"]),
            timeout_ms=_duration(said, "timeout", 60_000),
            group=encode_text(said.get("group", DEFAULT_GROUP), "group", MAX_GROUP_BYTES),
            if_exists=_one_of(said, "ifExists", ("", "move", "replace")),
            allow_identical=_flag(said, "allowIdentical"),
            past=_past(said),
            max_rejects=_whole(said, "maxRejects", 0, 0, 1 << 62),
            rejects_path=said.get("rejectsPath", ""),
            report_path=said.get("reportPath", ""),
            run=said.get("run", ""),
            states=_states(said.get("state", "")),
            tag=encode_tag(said.get("tag", "")).decode(),
            payload=_flag(said, "payload"),
            partitions=partitions,
            buckets=_range(said.get("buckets", "")),
            lease_ms=_duration(said, "lease", 0),
            max_rows_per_batch=_whole(said, "maxRowsPerBatch", 20_000, partitions, partitions * MAX_ROWS),
            wait_ms=_duration(said, "wait", 1_000),
            given=frozenset(said),
        )


def _duration(said: Mapping[str, str], name: str, default_ms: int) -> int:
    return duration_ms(said[name], name, least_ms=1) if name in said else default_ms


def _flag(said: Mapping[str, str], name: str) -> bool:
    value = said.get(name, "false").lower()
    if value not in ("true", "false"):
        raise Invalid(f"{name} must be true or false, not {value!r:.60}")
    return value == "true"


def _whole(said: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    value = said.get(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or not least <= int(value[:20]) <= most:
        raise Invalid(f"{name} must be a whole number from {least} to {most}, not {value!r:.60}")
    return int(value)


def _one_of(said: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = said.get(name, "")
    if value not in allowed:
        raise Invalid(f"{name} must be {' or '.join(repr(one) for one in allowed if one)}, not {value!r:.60}")
    return value


def _range(said: str) -> tuple[int, int] | None:
    if not said:
        return None
    first, _, end = said.partition("-")
    digits = first.isascii() and first.isdigit() and end.isascii() and end.isdigit()
    if not digits or not 0 <= int(first[:9]) < int(end[:9]) <= MAX_BUCKETS:
        raise Invalid(f"buckets must be A-B with 0 <= A < B <= {MAX_BUCKETS}, not {said!r:.60}")
    return int(first), int(end)


def _past(said: Mapping[str, str]) -> str:
    value = said.get("past", "")
    return value if value.isascii() and value.isdigit() and len(value) < 16 else _one_of(said, "past", ("", *PAST))


def _states(said: str) -> tuple[State, ...]:
    if not said:
        return LIVING
    if said == "all":
        return STATES
    allowed = {state.value: state for state in STATES}
    wanted = [word.strip() for word in said.split(",")]
    for word in wanted:
        if word not in allowed:
            raise Invalid(f"state must be some of {', '.join(allowed)} with commas, or all, not {word!r:.60}")
    return tuple(dict.fromkeys(allowed[word] for word in wanted))
