"""The ranges of `system.md` said plainly, message by message: what a decoded frame is held against after fuzzing.

Slow and without any of the shortcuts of `timeline/wire/`, so that the two can disagree.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import typing
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Answers, Rows, decode_headers, encode_headers
from timeline.wire import frames

YEAR_9999_MS = 253_402_300_799_999
CENTURY_MS = 100 * 366 * 86_400_000

TEXT_SIZES = {
    "ids": (1, 255),
    "id": (0, 255),
    "tags": (0, 64),
    "tag": (0, 64),
    "reasons": (0, 1024),
    "dead": (0, 1024),
    "groups": (1, 255),
    "group": (1, 255),
    "holders": (0, 255),
    "consumers": (0, 255),
    "bearers": (0, 255),
    "consumer": (1, 255),
    "holder": (0, 255),
    "topic": (0, 1020),
    "topics": (1, 1020),
    "name": (0, 1020),
    "broker": (0, 1024),
    "version": (0, 1024),
    "text": (0, 1024),
    "detail": (0, 1024),
    "trouble": (0, 1024),
    "store": (0, 1024),
    "sync": (0, 1024),
    "body": (0, 64 * 1024 * 1024 + 256 * 1024),
}
MAY_HOLD_NUL = {
    "tags", "tag", "reasons", "dead", "broker", "version", "text", "detail", "trouble", "store", "sync", "body",
}  # fmt: skip
TALLIES = (
    "available", "waiting", "consumers", "in_flight", "credit", "delivered", "redelivered", "credit_messages",
    "credit_bytes", "buckets", "dealt",
)  # fmt: skip
MOST = {
    **dict.fromkeys(TALLIES, 2**53 - 1),
    **dict.fromkeys(("counts", "version", "if_version", "revision", "topic_uid"), 2**63 - 1),
    "by_ms": CENTURY_MS,
    "retry_factor_percent": 100_000,
    "retry_jitter_percent": 100,
}
LEAST = {"version": 1, "by_ms": -CENTURY_MS, "in_ms": -1, "retry_factor_percent": 100}
WHOLE_64 = {"request", "session", "sessions", "echo", "op", "birth", "last_op", "payload_sum"}
DIFFERENCES = {"ahead_ms", "error_ms", "step_ms"}
DURATIONS = {
    "timeout_ms",
    "retry_after_ms",
    "lease_ms",
    "max_lease_ms",
    "heartbeat_ms",
    "window_ms",
    "step_ms",
    "in_ms",
    "retry_first_ms",
    "retry_cap_ms",
}


def out_of_range(frame: Any, blamed: typing.Collection[int] = ()) -> list[str]:
    """What of `frame` is out of range, but for the messages `blamed`."""
    found: list[str] = []
    lengths: set[int] = set()
    where = type(frame).__name__
    for field in dataclasses.fields(frame):
        value = getattr(frame, field.name)
        about = f"{where}.{field.name}"
        if isinstance(value, Answers | Rows | frames.TopicLoads | frames.LatenessCounts | frames.Consumers):
            found += out_of_range(value)
        elif isinstance(value, Ragged):
            lengths.add(len(value))
            found += _items(frame, field.name, about, value, blamed)
        elif isinstance(value, np.ndarray):
            lengths.add(len(value) - (field.name == "edges_ms"))
            numbers = [number for index, number in enumerate(value.tolist()) if index not in blamed]
            found += [f"{about} holds {number}" for number in numbers if not _number_fits(frame, field.name, number)]
        elif not _single_fits(frame, field.name, value):
            found.append(f"{about} is {value!r}")
    found += [f"{where}[{index}] has none" for index in _without_needed_id(frame) if index not in blamed]
    if len(lengths) > 1:
        found.append(f"{where} has columns of {lengths}")
    if lengths and max(lengths) > 100_000:
        found.append(f"{where} has {max(lengths)} messages")
    return found


def _without_needed_id(frame: Any) -> list[int]:
    """Where a put has no birth, or a move, revive or release no operation id."""
    if isinstance(frame, frames.Produce):
        return [index for index, birth in enumerate(frame.birth.tolist()) if not birth]
    if isinstance(frame, frames.Mutate) and frame.operation.name in ("MOVE", "REVIVE"):
        return [index for index, op in enumerate(frame.op.tolist()) if not op]
    if isinstance(frame, frames.Settle):
        pairs = zip(frame.operation.tolist(), frame.op.tolist(), strict=True)
        return [index for index, (operation, op) in enumerate(pairs) if operation == 4 and not op]
    return []


def _items(frame: Any, name: str, about: str, column: Ragged, blamed: typing.Collection[int]) -> list[str]:
    found = []
    for index in range(len(column)):
        item = column[index]
        if index in blamed:
            continue
        if name == "headers":
            if len(item) > 8192 or encode_headers(decode_headers(item)) != item:
                found.append(f"{about}[{index}] is {item!r}")
        elif name != "payloads" and not (_text_fits(name, item) and (name != "topics" or item.decode().isprintable())):
            found.append(f"{about}[{index}] is {item!r}")
    if sum(len(item) for item in column.tolist()) > frames.MAX_FRAME_BYTES:
        found.append(f"{about} is larger than a frame")
    return found


def _text_fits(name: str, item: bytes) -> bool:
    try:
        item.decode()
    except UnicodeDecodeError:
        return False
    least, most = TEXT_SIZES[name]
    return least <= len(item) <= most and (name in MAY_HOLD_NUL or b"\0" not in item)


def _number_fits(frame: Any, name: str, number: int) -> bool:
    if name in WHOLE_64:
        return 0 <= number < 2**64
    if name == "deliveries":
        return 0 <= number < 2**32
    if name == "payload_bytes":
        return 0 <= number <= 64 * 1024 * 1024
    if name == "operation":
        return number in (2, 3, 4, 5)
    if name == "flags":
        return number <= (15 if isinstance(frame, frames.Produce) else 3)
    if name in ("settled", "late", "repeat"):
        return number in (0, 1)
    if name == "status":
        return 0 <= number <= (13 if isinstance(frame, Answers) else 255)
    if name == "cause":
        return number <= 10
    if name == "health":
        return number <= 3
    if name == "version" and isinstance(frame, Answers):
        return 0 <= number < 2**63
    if re.search("_ms$", name):
        return 0 <= number <= YEAR_9999_MS
    return LEAST.get(name, 0) <= number <= MOST[name]


def _single_fits(frame: Any, name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, enum.IntEnum):
        return value in type(value)
    if isinstance(value, float) and name in DIFFERENCES:
        return math.isfinite(value) and abs(value) <= YEAR_9999_MS
    if isinstance(value, float):
        return math.isfinite(value) and 0 <= value <= YEAR_9999_MS
    if isinstance(value, int):
        if name == "limit" and isinstance(frame, frames.ScheduleCall):
            return 0 <= value <= 1_000
        if name in WHOLE_64:
            return 0 <= value < 2**64
        if name in DURATIONS:
            return LEAST.get(name, 0) <= value <= CENTURY_MS
        if name.endswith("_ms") and name != "by_ms":
            return 0 <= value <= YEAR_9999_MS
        return LEAST.get(name, 0) <= value <= MOST.get(name, 2**53 - 1)
    if isinstance(value, str):
        if name == "name" and isinstance(frame, frames.ScheduleCall):
            return True  # judged by its handler
        return _text_fits(name, value.encode()) and (name not in ("topic", "name") or not value or value.isprintable())
    if isinstance(value, bytes):
        return len(value) <= 4096 if name == "cursor" else _text_fits(name, value)
    if name == "displaced":  # never on the wire
        return bool(value == {})
    if name == "details":
        return all(0 <= index < len(frame) and len(said.encode()) <= 1024 for index, said in value.items())
    if name == "counts" and isinstance(frame, frames.ScheduleAnswer):
        return all(1 <= len(key.encode()) <= 64 and 0 <= count < 2**53 for key, count in value.items())
    if name == "counts":
        return all(0 <= status <= 255 and 0 <= count < 2**63 for status, count in value.items())
    if name == "topics":
        return all(
            dataclasses.replace(topic.settings, kind="timeline").check() and topic.uid >= 0 and topic.revision >= 1
            for topic in value
        )
    if name == "settings":
        return len(value) <= 256 and all(1 <= len(key.encode()) <= 64 for key in value)
    if name == "states":
        return len(set(value)) == len(value) <= 6
    if name == "warnings":
        return all(len(sentence.encode()) <= 1024 for sentence in value)
    if name == "secrets":
        return all(1 <= len(secret.encode()) <= 256 and "\0" not in secret for secret in value)
    return name == "brokers" and all(1 <= len(address.encode()) <= 1024 for address in value)
