"""Bytes → frames: one function a frame, which reads each field within its range. What it returns is wholly checked, but
for the values of Produce, Mutate and Settle that single messages are blamed for (see `judging.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from timeline.columns import Ragged, UInt8
from timeline.errors import Invalid
from timeline.model import (
    MAX_BATCH,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_HEADERS_BYTES,
    MAX_HOLDER_BYTES,
    MAX_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TOPIC_CHARS,
    MUTATIONS,
    ROW_DTYPES,
    Answers,
    Operation,
    Rows,
    State,
    Topic,
    TopicSettings,
    check_topic_name,
)
from timeline.wire.encode import SETTING_COLUMNS
from timeline.wire.frames import (
    Beat,
    Cause,
    Credit,
    Deliver,
    Forecast,
    Forecasted,
    Frame,
    Hello,
    Late,
    LateList,
    Leaving,
    LeavingReason,
    Mutate,
    Mutated,
    MutateFlag,
    MutateTag,
    Ping,
    Pong,
    Produce,
    Produced,
    PutFlag,
    Scan,
    ScanPage,
    Settle,
    Settled,
    SettleFlag,
    TagMutated,
    TopicAction,
    TopicList,
    Topics,
    Welcome,
)
from timeline.wire.judging import judge_headers, judge_ids, judge_reasons, judge_sizes, judge_tags, judge_texts
from timeline.wire.ranges import MAX_INT64, Body
from timeline.wire.refusals import WireError
from timeline.wire.verify import find_body

F = TypeVar("F")

MAX_SETTINGS = 256
MAX_SETTING_BYTES = 1024
MAX_STEPS = 10_000
_SETTLED, _LATE, _REPEAT = 1, 2, 4
_KNOWN_MARKS = 7
_SETTLES = bytes((Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY))
_STATES = tuple(State)
_LEAVING_REASONS = tuple(LeavingReason)
_PUT_FLAGS, _SETTLE_FLAGS, _MUTATE_FLAGS = int(~PutFlag(0)), int(~SettleFlag(0)), int(~MutateFlag(0))


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
    said = part.judged("details", judge_reasons).tolist()
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
        ids=body.judged("ids", judge_ids),
        birth=body.uint64("birth"),
        version=body.int64("version", 1),
    )


def _credit(body: Body) -> Credit:
    return Credit(body.tally("messages"), body.tally("bytes"), body.whole("echo"))


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
    addresses = body.judged("brokers", lambda column: judge_texts(column, "an address", 1, 1024))
    return Welcome(
        broker=body.sentence("broker"),
        now_ms=body.time("now_ms"),
        lease_ms=body.duration("lease_ms"),
        max_lease_ms=body.duration("max_lease_ms"),
        max_payload_bytes=body.number("max_payload_bytes", 0, MAX_PAYLOAD_BYTES),
        heartbeat_ms=body.duration("heartbeat_ms"),
        brokers=tuple(address.decode() for address in addresses),
    )


def _judge_all_of_headers(headers: Ragged) -> dict[int, str]:
    return judge_sizes(headers, "headers", MAX_HEADERS_BYTES) or judge_headers(headers)


def _deliver(body: Body) -> Deliver:
    return Deliver(
        leased_ms=body.time("leased_ms"),
        pushed_ms=body.time("pushed_ms"),
        ids=body.judged("ids", judge_ids),
        birth=body.uint64("birth"),
        version=body.int64("version", 1),
        due_ms=body.times("due_ms"),
        scheduled_ms=body.times("scheduled_ms"),
        lease_until_ms=body.times("lease_until_ms"),
        deliveries=body.uint32("deliveries"),
        payload_sum=body.uint64("payload_sum"),
        payloads=body.ragged("payloads"),
        headers=body.optional_judged("headers", _judge_all_of_headers),
        tags=body.optional_judged("tags", judge_tags),
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


def _scan(body: Body) -> Scan:
    ids = body.optional_judged("ids", judge_ids)
    states = body.bytes_of("states", len(_STATES))
    if len(set(states)) < len(states) or any(state >= len(_STATES) for state in states):
        raise body.refusal("states", f"takes each of 0 to {len(_STATES) - 1} once")
    return Scan(
        topic=body.topic(),
        states=tuple(_STATES[state] for state in states),
        tag=body.tag("tag"),
        due_from_ms=body.time("due_from_ms"),
        due_to_ms=body.time("due_to_ms"),
        ids=ids,
        payload=body.flag("payload"),
        cursor=body.cursor(),
        limit=body.tally("limit"),
    )


_ROW_RANGES = {"version": (1, MAX_INT64), "payload_bytes": (0, MAX_PAYLOAD_BYTES)}


def _rows(body: Body) -> Rows:
    part = body.part("rows", "Rows")
    columns: dict[str, Any] = {"ids": part.judged("ids", judge_ids)}
    for name, dtype in ROW_DTYPES.items():
        if dtype is np.uint64:
            columns[name] = part.uint64(name)
        elif dtype is np.uint32:
            columns[name] = part.uint32(name, _ROW_RANGES.get(name, (0, 2**32 - 1))[1])
        else:
            columns[name] = part.int64(name, *_ROW_RANGES[name]) if name in _ROW_RANGES else part.times(name)
    return Rows(
        groups=part.judged("groups", lambda column: judge_texts(column, "a group", 1, MAX_GROUP_BYTES)),
        holders=part.judged("holders", lambda column: judge_texts(column, "a holder", 0, MAX_HOLDER_BYTES)),
        tags=part.judged("tags", judge_tags),
        dead=part.judged("dead", judge_reasons),
        payloads=part.optional_ragged("payloads"),
        headers=part.optional_judged("headers", _judge_all_of_headers),
        **columns,
    )


def _scan_page(body: Body) -> ScanPage:
    return ScanPage(_rows(body), body.time("now_ms"), body.cursor())


def _forecast(body: Body) -> Forecast:
    window_ms = body.number("window_ms", 1, MAX_DURATION_MS)
    step_ms = body.number("step_ms", 1, MAX_DURATION_MS)
    if -(-window_ms // step_ms) > MAX_STEPS:
        raise body.refusal("step_ms", f"of {step_ms} makes more than {MAX_STEPS} steps of the window")
    return Forecast(body.topic(), window_ms, step_ms)


def _forecasted(body: Body) -> Forecasted:
    edges_ms = body.times("edges_ms")
    if not 1 <= len(edges_ms) <= MAX_STEPS + 1 or bool((edges_ms[1:] < edges_ms[:-1]).any()):
        raise body.refusal("edges_ms", f"are 1 to {MAX_STEPS + 1} times that do not decrease")
    body.count -= 1
    return Forecasted(edges_ms, body.int64("counts", 0), body.tally("overdue"), body.flag("exact"))


def _topics(body: Body) -> Topics:
    action = TopicAction(body.choice("action", tuple(TopicAction)))
    name = body.text("name")
    if name or action is not TopicAction.LIST:
        name = body.topic("name")
    names = body.judged("settings", lambda column: judge_texts(column, "a setting's name", 1, 64)).tolist()
    if len(names) > MAX_SETTINGS or len(set(names)) < len(names):
        raise body.refusal("settings", f"are up to {MAX_SETTINGS}, each once")
    kinds = body.uint8("kinds", b"\0\1\2").tolist()
    numbers = body.int64("numbers").tolist()
    texts = body.judged("texts", lambda column: judge_texts(column, "a setting", 0, MAX_SETTING_BYTES)).tolist()
    settings: dict[str, int | str | bool] = {}
    for setting, kind, number, text in zip(names, kinds, numbers, texts, strict=True):
        if kind == 1 and number not in (0, 1):
            raise body.refusal("numbers", f"has {number} for a setting that is 0 or 1")
        settings[setting.decode()] = text.decode() if kind == 2 else bool(number) if kind == 1 else number
    return Topics(action, name, settings, body.number("revision", 0, MAX_INT64))


def _topic_list(body: Body) -> TopicList:
    names = body.judged("names", lambda column: judge_texts(column, "a topic's name", 1, 4 * MAX_TOPIC_CHARS))
    columns = {name: body.int64(name).tolist() for name in SETTING_COLUMNS if name in body.places}
    columns["paused"] = [flag == 1 for flag in body.uint8("paused", b"\0\1").tolist()]
    columns["kind"] = [kind.decode() for kind in body.judged("kind", lambda column: judge_texts(column, "kind", 1, 64))]
    uids, revisions = body.int64("uid", 0).tolist(), body.int64("revision", 1).tolist()
    created = body.times("created_ms").tolist()
    topics = []
    try:
        for index, name in enumerate(names.tolist()):
            settings = TopicSettings(**{setting: column[index] for setting, column in columns.items()}).check()
            topics.append(
                Topic(check_topic_name(name.decode()), uids[index], settings, revisions[index], created[index])
            )
    except Invalid as bad:
        raise WireError(f"TopicList has a topic out of range: {bad.reason}") from None
    return TopicList(body.whole("status"), body.sentence("detail"), tuple(topics))


def _judge_known_id(id: bytes) -> dict[int, str]:
    return judge_ids(Ragged.of([id])) if id else {}


def _late(body: Body) -> Late:
    id = body.bytes_of("id", MAX_ID_BYTES)
    for sentence in _judge_known_id(id).values():
        raise body.refusal("id", sentence)
    topic = body.topic() if body.text("topic") else ""
    return Late(body.time("since_ms"), topic, id, body.number("limit", 1, MAX_BATCH))


def _late_list(body: Body) -> LateList:
    cause = body.uint8("cause")
    unknown = cause >= len(Cause)
    if unknown.any():
        if not body.lenient:
            raise body.refusal("cause", f"has a value above {len(Cause) - 1}")
        cause = np.where(unknown, np.uint8(Cause.UNEXPLAINED), cause)
    return LateList(
        topics=body.judged("topics", lambda column: judge_texts(column, "a topic", 1, 4 * MAX_TOPIC_CHARS)),
        ids=body.judged("ids", judge_ids),
        consumers=body.judged("consumers", lambda column: judge_texts(column, "a consumer", 0, MAX_HOLDER_BYTES)),
        due_ms=body.times("due_ms"),
        delivered_ms=body.times("delivered_ms"),
        cause=cause,
        dropped=body.tally("dropped"),
        now_ms=body.time("now_ms"),
    )


def _ping(body: Body) -> Ping:
    return Ping(body.reading("sent_ms"))


def _pong(body: Body) -> Pong:
    return Pong(
        body.reading("sent_ms"),
        body.reading("received_ms"),
        body.reading("answered_ms"),
        body.sentence("broker"),
        body.sentence("version"),
    )


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
    "Scan": _scan,
    "ScanPage": _scan_page,
    "Forecast": _forecast,
    "Forecasted": _forecasted,
    "Topics": _topics,
    "TopicList": _topic_list,
    "Late": _late,
    "LateList": _late_list,
    "Ping": _ping,
    "Pong": _pong,
}
