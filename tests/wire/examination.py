"""What may come of bytes that are handed to the decoder: the documented refusal, or a frame of values in range."""

from __future__ import annotations

from typing import Any

from tests.wire.plain_rules import out_of_range
from tests.wire.sameness import same
from timeline.model import TopicSettings
from timeline.wire import (
    Mutate,
    Produce,
    Settle,
    TopicList,
    WireError,
    decode,
    encode,
    validate_mutate,
    validate_produce,
    validate_settle,
)

JUDGES: dict[type, Any] = {Produce: validate_produce, Mutate: validate_mutate, Settle: validate_settle}


def judged(data: bytes) -> tuple[Any, dict[int, Any]] | None:
    """What a broker or driver makes of these bytes: the frame and the messages to blame, or None when refused."""
    try:
        frame = decode(data)
    except WireError as refused:
        assert str(refused).startswith("INVALID: "), f"a refusal reads {str(refused)!r:.200}"
        return None
    judge = JUDGES.get(type(frame))
    return frame, (judge(frame) if judge else {})


def sound(frame: Any, blamed: dict[int, Any]) -> None:
    """AssertionError when a value of `frame` is out of range, but for the messages `blamed`; or when none is to blame
    and the frame, written and read again, does not say the same."""
    bad = out_of_range(frame, blamed)
    assert not bad, f"out of range: {'; '.join(bad)[:1_000]}"
    if not blamed and not _of_kinds_to_come(frame):
        again = decode(encode(frame))
        assert same(again, frame), f"written and read again, {frame!r:.500} becomes {again!r:.500}"


def _of_kinds_to_come(frame: Any) -> bool:
    """Whether a newer minor tells of topics of kinds that this one cannot write."""
    return isinstance(frame, TopicList) and any(topic.settings.kind != TopicSettings().kind for topic in frame.topics)


def examine(data: bytes) -> bool:
    """Whether `data` decoded; False when it was refused. AssertionError when values are out of range, and whatever the
    decoder raises that is no refusal."""
    result = judged(data)
    if result is not None:
        sound(*result)
    return result is not None


def allowed_bytes(data: bytes) -> int:
    """What decoding and judging `data` may allocate at most. Columns are views; what is copied (texts, ids while they
    are judged, sentences) is bounded by the frame."""
    return 8 * len(data) + 16_000
