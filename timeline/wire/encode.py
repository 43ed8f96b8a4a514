"""Frames → bytes. Most frames' fields are named as in the schema and are written as they are; the others
say here how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import MAX_REASON_BYTES, Answers, State, TopicSettings
from timeline.wire.frames import BrokerStatus, Frame, Leaving, Pong, Scan, TagMutated, TopicList, Topics, Welcome
from timeline.wire.generated import layout
from timeline.wire.verify import WireError
from timeline.wire.write import Get, write_frame

_STATES = {state: number for number, state in enumerate(State)}
_WHOLE, _FLAG, _TEXT = (layout.ENUMS["SettingKind"][kind] for kind in ("WHOLE", "FLAG", "TEXT"))
SETTING_COLUMNS = [
    name for name, kind, *_ in layout.TABLES["TopicList"] if kind == "[long]" and hasattr(TopicSettings, name)
]
"""The settings that are whole numbers, as TopicList has them."""


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Its columns must have equal lengths; sentences are cut at 1 KiB.

    Raises TooLarge when it would exceed MAX_FRAME_BYTES, WireError when a value does not fit its field.
    """
    name = type(frame).__name__
    if name not in _BODY_NAMES:
        raise WireError(f"{name} is no frame")
    return write_frame(name, _get(frame), _get)


def _get(value: Any) -> Get:
    adapt = _ADAPTED.get(type(value))
    return value.__getattribute__ if adapt is None else adapt(value).__getitem__


def _cut(sentence: str) -> str:
    """At most MAX_REASON_BYTES of it, whole characters."""
    if len(sentence) * 4 <= MAX_REASON_BYTES:
        return sentence
    return sentence.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


def _answers(answers: Answers) -> dict[str, Any]:
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
        "details": Ragged.of([_cut(answers.details[index]).encode() for index in at]) if at else None,
    }


def _fields(value: Any, **instead: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__ if name not in instead} | instead


def _tag_mutated(frame: TagMutated) -> dict[str, Any]:
    return _fields(
        frame,
        counts=None,
        status=bytes(frame.counts),
        count=np.fromiter(frame.counts.values(), np.int64, len(frame.counts)),
    )


def _topics(frame: Topics) -> dict[str, Any]:
    kinds, numbers, texts = [], [], []
    for name, value in frame.settings.items():
        if not isinstance(value, int | str):
            raise WireError(f"setting {name!r} must be a whole number, true or false, or a text, not {value!r:.80}")
        kinds.append(_TEXT if isinstance(value, str) else _FLAG if isinstance(value, bool) else _WHOLE)
        numbers.append(0 if isinstance(value, str) else int(value))
        texts.append(value.encode() if isinstance(value, str) else b"")
    return {
        "action": frame.action,
        "name": frame.name,
        "revision": frame.revision,
        "settings": Ragged.of([name.encode() for name in frame.settings]),
        "kinds": bytes(kinds),
        "numbers": np.array(numbers, np.int64),
        "texts": Ragged.of(texts),
    }


def _topic_list(frame: TopicList) -> dict[str, Any]:
    topics = frame.topics
    columns: dict[str, Any] = {
        name: np.array([getattr(topic.settings, name) for topic in topics], np.int64) for name in SETTING_COLUMNS
    }
    for name in ("uid", "revision", "created_ms"):
        columns[name] = np.array([getattr(topic, name) for topic in topics], np.int64)
    return columns | {
        "status": frame.status,
        "detail": _cut(frame.detail),
        "names": Ragged.of([topic.name.encode() for topic in topics]),
        "paused": bytes(topic.settings.paused for topic in topics),
        "kind": Ragged.of([topic.settings.kind.encode() for topic in topics]),
    }


def _with_brokers(frame: Welcome | Pong) -> dict[str, Any]:
    return _fields(frame, brokers=Ragged.of([address.encode() for address in frame.brokers]))


def _standing(frame: BrokerStatus) -> dict[str, Any]:
    cut = {name: _cut(getattr(frame, name)) for name in ("trouble", "store", "sync")}
    return _fields(frame, **cut, warnings=Ragged.of([_cut(warning).encode() for warning in frame.warnings]))


_ADAPTED: dict[type, Callable[[Any], dict[str, Any]]] = {
    Answers: _answers,
    TagMutated: _tag_mutated,
    Topics: _topics,
    TopicList: _topic_list,
    Leaving: lambda frame: _fields(frame, text=_cut(frame.text)),
    BrokerStatus: _standing,
    Scan: lambda frame: _fields(frame, states=bytes(_STATES[state] for state in frame.states)),
    Welcome: _with_brokers,
    Pong: _with_brokers,
}
_BODY_NAMES = frozenset(layout.BODIES.values())
