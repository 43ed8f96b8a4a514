"""Bytes → frames: one function a frame, which reads each field within its range. What it returns is wholly checked, but
for the values of Produce, Mutate and Settle that single messages are blamed for (see `validate.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np

from timeline.columns import UInt8
from timeline.model import (
    MAX_BATCH,
    MAX_DURATION_MS,
    MAX_PAYLOAD_BYTES,
    MUTATIONS,
    Answers,
    LeavingReason,
    Operation,
    Status,
)
from timeline.wire.decode_questions import QUESTION_READERS
from timeline.wire.frames import (
    Beat,
    Credit,
    Deliver,
    Frame,
    Hello,
    Leaving,
    Mutate,
    Mutated,
    MutateFlag,
    MutateTag,
    Produce,
    Produced,
    PutFlag,
    Settle,
    Settled,
    SettleFlag,
    TagMutated,
    Welcome,
)
from timeline.wire.ranges import Body
from timeline.wire.validate import validate_headers, validate_ids, validate_reasons, validate_tags
from timeline.wire.verify import WireError, find_body

F = TypeVar("F")

_KNOWN_MARKS = 7
_STATUSES = bytes(status.code for status in Status)
_SETTLES = bytes((Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY))
_LEAVING_REASONS = tuple(LeavingReason)
_PUT_FLAGS, _SETTLE_FLAGS, _MUTATE_FLAGS = sum(PutFlag), sum(SettleFlag), sum(MutateFlag)


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """The frame that `data` is. Its columns are views of `data`, which must not be changed while they are in use.

    Raises WireError, which says what is wrong; WireVersionError for another major; UnknownFrame for a kind of frame
    that only a newer minor knows, which a stream passes over.
    """
    body = Body.at(find_body(data))
    return _READERS[body.name](body)


def decode_as(data: bytes | bytearray | memoryview, kind: type[F]) -> F:
    """The frame that `data` is, which must be a `kind`. Raises like `decode`, and WireError for any other frame."""
    frame = decode(data)
    if not isinstance(frame, kind):
        raise WireError(f"a {type(frame).__name__} frame came where a {kind.__name__} was expected")
    return frame


def _produce(body: Body) -> Produce:
    return Produce(
        ids=body.ragged("ids"),
        request=body.whole("request"),
        topic=body.topic(),
        group=body.name_of("group"),
        birth=body.uint64("birth"),
        time_ms=body.int64("time_ms"),
        flags=body.flags("flags", _PUT_FLAGS),
        payloads=body.ragged("payloads"),
        expires_ms=body.optional_int64("expires_ms"),
        tags=body.optional_ragged("tags"),
        headers=body.optional_ragged("headers"),
        timeout_ms=body.duration("timeout_ms"),
    )


def _answers(body: Body) -> Answers:
    part = body.part("answers", "Answers")
    status = part.uint8("status")
    if status.tobytes().translate(None, _STATUSES):
        status = np.where(status < len(_STATUSES), status, np.uint8(Status.UNKNOWN.code))
    count = len(status)
    settled, late, repeat = _marks(part, count)
    return Answers(
        status=status,
        version=part.int64("version", 0),
        due_ms=part.times("due_ms"),
        settled=settled,
        late=late,
        repeat=repeat,
        details=_details(part, count) if "detail_at" in part.places else {},
    )


def _marks(part: Body, count: int) -> tuple[UInt8, UInt8, UInt8]:
    if "marks" not in part.places:
        return np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    marks = part.flags("marks", _KNOWN_MARKS)
    one = np.uint8(1)
    return marks & one, marks >> one & one, marks >> np.uint8(2)


def _details(part: Body, count: int) -> dict[int, str]:
    part.count = -1
    at = part.uint32("detail_at").tolist()
    said = part.judged("details", validate_reasons).tolist()
    if at and (at[-1] >= count or any(high <= low for low, high in pairwise(at))):
        raise part.refusal("detail_at", f"must ascend below {count}")
    return {index: sentence.decode() for index, sentence in zip(at, said, strict=True)}


def _produced(body: Body) -> Produced:
    return Produced(body.whole("request"), _answers(body), body.duration("retry_after_ms"))


def _mutate(body: Body) -> Mutate:
    return Mutate(
        topic=body.topic(),
        group=body.name_of("group"),
        operation=Operation(body.choice("operation", MUTATIONS)),
        ids=body.ragged("ids"),
        time_ms=body.int64("time_ms"),
        flags=body.flags("flags", _MUTATE_FLAGS),
        if_version=body.int64("if_version"),
        op=body.uint64("op"),
        timeout_ms=body.duration("timeout_ms"),
    )


def _mutated(body: Body) -> Mutated:
    return Mutated(_answers(body), body.duration("retry_after_ms"))


def _mutate_tag(body: Body) -> MutateTag:
    return MutateTag(
        topic=body.topic(),
        group=body.name_of("group"),
        operation=Operation(body.choice("operation", (Operation.MOVE, Operation.CANCEL))),
        tag=body.tag("tag", 1),
        op=body.whole("op"),
        at_ms=body.time("at_ms"),
        in_ms=body.number("in_ms", -1, MAX_DURATION_MS),
        by_ms=body.number("by_ms", -MAX_DURATION_MS, MAX_DURATION_MS),
        leased=body.flag("leased"),
        dry_run=body.flag("dry_run"),
        cursor=body.cursor(),
        started_ms=body.time("started_ms"),
        limit=body.number("limit", 1, MAX_BATCH),
        timeout_ms=body.duration("timeout_ms"),
    )


def _tag_mutated(body: Body) -> TagMutated:
    status = body.uint8("status").tolist()
    counts = dict(zip(status, body.int64("count", 0).tolist(), strict=True))
    if len(counts) < len(status):
        raise body.refusal("status", "names a status twice")
    return TagMutated(counts, body.cursor(), body.time("started_ms"), body.time("at_ms"))


def _hello(body: Body) -> Hello:
    return Hello(
        topic=body.topic(),
        consumer=body.name_of("consumer"),
        session=body.whole("session"),
        lease_ms=body.duration("lease_ms"),
        credit_messages=body.tally("credit_messages"),
        credit_bytes=body.tally("credit_bytes"),
        ids=body.judged("ids", validate_ids),
        birth=body.uint64("birth"),
        version=body.int64("version", 1),
        room_messages=body.tally("room_messages"),
        room_bytes=body.tally("room_bytes"),
    )


def _credit(body: Body) -> Credit:
    return Credit(
        body.tally("messages"),
        body.tally("bytes"),
        body.whole("echo"),
        body.difference("ahead_ms"),
        body.difference("error_ms"),
    )


def _settle(body: Body) -> Settle:
    return Settle(
        request=body.whole("request"),
        ids=body.ragged("ids"),
        birth=body.uint64("birth"),
        version=body.int64("version", 1),
        operation=body.uint8("operation", _SETTLES),
        time_ms=body.int64("time_ms"),
        flags=body.flags("flags", _SETTLE_FLAGS),
        op=body.uint64("op"),
        reasons=body.optional_ragged("reasons"),
        credit_messages=body.tally("credit_messages"),
        credit_bytes=body.tally("credit_bytes"),
    )


def _welcome(body: Body) -> Welcome:
    return Welcome(
        broker=body.sentence("broker"),
        now_ms=body.time("now_ms"),
        lease_ms=body.duration("lease_ms"),
        max_lease_ms=body.duration("max_lease_ms"),
        max_payload_bytes=body.number("max_payload_bytes", 0, MAX_PAYLOAD_BYTES),
        heartbeat_ms=body.duration("heartbeat_ms"),
        brokers=body.addresses("brokers"),
    )


def _deliver(body: Body) -> Deliver:
    return Deliver(
        leased_ms=body.time("leased_ms"),
        pushed_ms=body.time("pushed_ms"),
        ids=body.judged("ids", validate_ids),
        birth=body.uint64("birth"),
        version=body.int64("version", 1),
        due_ms=body.times("due_ms"),
        scheduled_ms=body.times("scheduled_ms"),
        lease_until_ms=body.times("lease_until_ms"),
        deliveries=body.uint32("deliveries"),
        payload_sum=body.uint64("payload_sum"),
        payloads=body.ragged("payloads"),
        headers=body.optional_judged("headers", validate_headers),
        tags=body.optional_judged("tags", validate_tags),
        max_deliveries=body.whole("max_deliveries"),
    )


def _settled(body: Body) -> Settled:
    return Settled(body.whole("request"), _answers(body), body.time("now_ms"))


def _beat(body: Body) -> Beat:
    return Beat(body.time("now_ms"), body.whole("echo"))


def _leaving(body: Body) -> Leaving:
    reason = body.whole("reason")
    if body.lenient and reason not in _LEAVING_REASONS:
        reason = LeavingReason.DRAINING
    else:
        reason = body.choice("reason", _LEAVING_REASONS)
    return Leaving(LeavingReason(reason), body.sentence("text"))


_READERS: dict[str, Callable[[Body], Frame]] = {
    "Produce": _produce,
    "Produced": _produced,
    "Mutate": _mutate,
    "MutateTag": _mutate_tag,
    "Mutated": _mutated,
    "TagMutated": _tag_mutated,
    "Hello": _hello,
    "Credit": _credit,
    "Settle": _settle,
    "Welcome": _welcome,
    "Deliver": _deliver,
    "Settled": _settled,
    "Beat": _beat,
    "Leaving": _leaving,
    **QUESTION_READERS,
}
