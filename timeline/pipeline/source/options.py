"""The options of the data source, read and checked once, before anything runs.

Names are those of the driver in Spark's spelling (`ifExists` for `if_exists`). Case and underscores do not count.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
"""Most rows that one partition of a micro-batch may hold: as many leases as one Hello could name."""

_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


@dataclass(frozen=True)
class SourceOptions:
    """The options of one query. Durations are in ms. `addresses`: host:port, separated by commas."""

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

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> SourceOptions:
        """Read Spark's options. Raise Invalid, which names the option."""
        said: dict[str, str] = {}
        for name, value in asked.items():
            known = _KNOWN.get(_plain(name))
            if known is not None:
                said[known] = value
            elif name.lower() not in _SPARKS_OWN:
                near = difflib.get_close_matches(_plain(name), _KNOWN, n=1)
                hint = f": did you mean {_KNOWN[near[0]]}?" if near else f". There are {', '.join(_OPTIONS)}"
                raise Invalid(f"the source 'timeline' has no option {name!r}{hint}")
        if not said.get("topic"):
            raise Invalid("no topic is named. Set .option('topic', 'reminders')")
        read = {_OPTIONS[name][0]: _OPTIONS[name][1](value, name) for name, value in said.items()}
        read["addresses"] = read.get("addresses") or _addresses("", "addresses")
        options = cls(**read)
        if "maxRowsPerBatch" in said:
            least, most = options.partitions, options.partitions * MAX_ROWS
            _whole(least, most)(said["maxRowsPerBatch"], "maxRowsPerBatch")
        return options


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _text(value: str, name: str) -> str:
    return value


def _addresses(value: str, name: str) -> str:
    addresses = value or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    parse_addresses(addresses)
    return addresses


def _duration(value: str, name: str) -> int:
    return duration_ms(value, name, least_ms=1)


def _flag(value: str, name: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise Invalid(f"{name} must be true or false, not {value.lower()!r:.60}")
    return value.lower() == "true"


def _whole(least: int, most: int) -> Callable[[str, str], int]:
    def read(value: str, name: str) -> int:
        if not value.isascii() or not value.isdigit() or not least <= int(value[:20]) <= most:
            raise Invalid(f"{name} must be a whole number from {least} to {most}, not {value!r:.60}")
        return int(value)

    return read


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def read(value: str, name: str) -> str:
        if value and value not in allowed:
            raise Invalid(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r:.60}")
        return value

    return read


def _range(said: str, name: str) -> tuple[int, int] | None:
    if not said:
        return None
    first, _, end = said.partition("-")
    digits = first.isascii() and first.isdigit() and end.isascii() and end.isdigit()
    if not digits or not 0 <= int(first[:9]) < int(end[:9]) <= MAX_BUCKETS:
        raise Invalid(f"buckets must be A-B with 0 <= A < B <= {MAX_BUCKETS}, not {said!r:.60}")
    return int(first), int(end)


def _past(value: str, name: str) -> str:
    return value if value.isascii() and value.isdigit() and len(value) < 16 else _one_of(*PAST)(value, name)


def _states(said: str, name: str) -> tuple[State, ...]:
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


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "addresses": ("addresses", _addresses),  # host:port of the brokers, comma-separated
    "topic": ("topic", lambda value, name: check_topic_name(value)),
    "timeout": ("timeout_ms", _duration),  # how long a call may take
    # Write. `group`: the owner of the messages. `past`, for rows that are due already, may be a time in ms: reject rows
    # due by then. The same `run` recognises the rows that an earlier try has put.
    "group": ("group", lambda value, name: encode_text(value, name, MAX_GROUP_BYTES)),
    "ifExists": ("if_exists", _one_of("move", "replace")),
    "allowIdentical": ("allow_identical", _flag),  # identical rows without an id collapse into one
    "past": ("past", _past),
    "maxRejects": ("max_rejects", _whole(0, 1 << 62)),  # how many rows may be rejected before the job fails
    "rejectsPath": ("rejects_path", _text),  # a folder or bucket for rejected rows
    "reportPath": ("report_path", _text),  # a JSON file with the counts
    "run": ("run", _text),
    # Read.
    "state": ("states", _states),  # waiting, available, leased, dead, several with commas, or all
    "tag": ("tag", lambda value, name: encode_tag(value).decode()),
    "payload": ("payload", _flag),  # with payload and headers
    "partitions": ("partitions", _whole(1, MAX_PARTITIONS)),  # how many tasks
    "buckets": ("buckets", _range),  # only the buckets from A to before B, as A-B
    # Stream read. `wait`: how long to look for due messages before the query gets none.
    "lease": ("lease_ms", _duration),  # of a micro-batch, extended while it works
    "maxRowsPerBatch": ("max_rows_per_batch", _whole(1, MAX_PARTITIONS * MAX_ROWS)),
    "wait": ("wait_ms", _duration),
}
"""By its name in Spark: the option's field, and the reader of its text, which gets the name for errors."""
_KNOWN = {_plain(name): name for name in _OPTIONS}
