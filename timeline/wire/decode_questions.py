"""Bytes → the frames that ask a broker something, and their answers: the second half of `decode.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import (
    MAX_BATCH,
    MAX_BUCKETS,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_HOLDER_BYTES,
    MAX_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TOPIC_CHARS,
    ROW_DTYPES,
    LateCause,
    Rows,
    State,
    Topic,
    TopicSettings,
    check_topic_name,
)
from timeline.wire.encode import SETTING_COLUMNS
from timeline.wire.frames import (
    MAX_COUNT,
    BrokerStatus,
    Consumers,
    Forecast,
    Forecasted,
    Frame,
    Health,
    Hint,
    Hinted,
    Late,
    LateList,
    LatenessCounts,
    Ping,
    Pong,
    Scan,
    ScanPage,
    StatusRequest,
    TopicAction,
    TopicList,
    TopicLoads,
    Topics,
)
from timeline.wire.ranges import MAX_INT64, Body
from timeline.wire.validate import validate_headers, validate_ids, validate_reasons, validate_tags, validate_texts
from timeline.wire.verify import WireError

MAX_SETTINGS = 256
MAX_SETTING_BYTES = 1024
MAX_STEPS = 10_000
KNOWN_KIND = TopicSettings().kind
_STATES = tuple(State)


def _scan(body: Body) -> Scan:
    ids = body.optional_judged("ids", validate_ids)
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
        bucket_from=body.number("bucket_from", 0, MAX_BUCKETS),
        bucket_to=body.number("bucket_to", 0, MAX_BUCKETS),
        holder=body.optional_name("holder"),
    )


_ROW_RANGES = {"version": (1, MAX_INT64), "payload_bytes": (0, MAX_PAYLOAD_BYTES)}


def _rows(body: Body) -> Rows:
    part = body.part("rows", "Rows")
    columns: dict[str, Any] = {"ids": part.judged("ids", validate_ids)}
    for name, dtype in ROW_DTYPES.items():
        if dtype is np.uint64:
            columns[name] = part.uint64(name)
        elif dtype is np.uint32:
            columns[name] = part.uint32(name, _ROW_RANGES.get(name, (0, 2**32 - 1))[1])
        else:
            columns[name] = part.int64(name, *_ROW_RANGES[name]) if name in _ROW_RANGES else part.times(name)
    return Rows(
        groups=part.judged("groups", lambda column: validate_texts(column, "a group", 1, MAX_GROUP_BYTES)),
        holders=part.judged("holders", lambda column: validate_texts(column, "a holder", 0, MAX_HOLDER_BYTES)),
        tags=part.judged("tags", validate_tags),
        dead=part.judged("dead", validate_reasons),
        payloads=part.optional_ragged("payloads"),
        headers=part.optional_judged("headers", validate_headers),
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
    names = body.judged("settings", lambda column: validate_texts(column, "a setting's name", 1, 64)).tolist()
    if len(names) > MAX_SETTINGS or len(set(names)) < len(names):
        raise body.refusal("settings", f"are up to {MAX_SETTINGS}, each once")
    kinds = body.uint8("kinds", b"\0\1\2").tolist()
    numbers = body.int64("numbers").tolist()
    texts = body.judged(
        "texts", lambda column: validate_texts(column, "a setting", 0, MAX_SETTING_BYTES, nul=True)
    ).tolist()
    settings: dict[str, int | str | bool] = {}
    for setting, kind, number, text in zip(names, kinds, numbers, texts, strict=True):
        if kind == 1 and number not in (0, 1):
            raise body.refusal("numbers", f"has {number} for a setting that is 0 or 1")
        settings[setting.decode()] = text.decode() if kind == 2 else bool(number) if kind == 1 else number
    return Topics(action, name, settings, body.number("revision", 0, MAX_INT64))


def _validate_topic_names(names: Ragged) -> dict[int, str]:
    bad = validate_texts(names, "a topic's name", 1, 4 * MAX_TOPIC_CHARS)
    if bad:
        return bad
    refused: dict[bytes, str] = {}
    for name in set(names):
        try:
            check_topic_name(name.decode())
        except Invalid as why:
            refused[name] = why.reason
    return {index: refused[name] for index, name in enumerate(names) if name in refused} if refused else {}


def _topic_list(body: Body) -> TopicList:
    names = body.judged("names", _validate_topic_names)
    columns = {name: body.int64(name).tolist() for name in SETTING_COLUMNS if name in body.places}
    columns["paused"] = [flag == 1 for flag in body.uint8("paused", b"\0\1").tolist()]
    columns["kind"] = [
        kind.decode() for kind in body.judged("kind", lambda column: validate_texts(column, "kind", 1, 64))
    ]
    uids, revisions = body.int64("uid", 0).tolist(), body.int64("revision", 1).tolist()
    created = body.times("created_ms").tolist()
    topics = []
    try:
        for index, name in enumerate(names.tolist()):
            settings = TopicSettings(**{setting: column[index] for setting, column in columns.items()})
            # In a newer minor's frame there may be kinds that are not known here: they are told of all the same.
            (replace(settings, kind=KNOWN_KIND) if body.lenient else settings).check()
            topics.append(Topic(name.decode(), uids[index], settings, revisions[index], created[index]))
    except Invalid as bad:
        raise WireError(f"TopicList has a topic out of range: {bad.reason}") from None
    return TopicList(body.whole("status"), body.sentence("detail"), tuple(topics))


def _validate_known_id(id: bytes) -> dict[int, str]:
    return validate_ids(Ragged.of([id])) if id else {}


def _late(body: Body) -> Late:
    id = body.bytes_of("id", MAX_ID_BYTES)
    for sentence in _validate_known_id(id).values():
        raise body.refusal("id", sentence)
    topic = body.topic() if body.text("topic") else ""
    return Late(body.time("since_ms"), topic, id, body.number("limit", 1, MAX_BATCH))


def _late_list(body: Body) -> LateList:
    cause = body.uint8("cause")
    unknown = cause >= len(LateCause)
    if unknown.any():
        if not body.lenient:
            raise body.refusal("cause", f"has a value above {len(LateCause) - 1}")
        cause = np.where(unknown, np.uint8(LateCause.UNEXPLAINED), cause)
    return LateList(
        topics=body.judged("topics", _validate_topic_names),
        ids=body.judged("ids", validate_ids),
        consumers=body.judged("consumers", lambda column: validate_texts(column, "a consumer", 0, MAX_HOLDER_BYTES)),
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
        body.addresses("brokers"),
        body.difference("step_ms"),
    )


def _hint(body: Body) -> Hint:
    return Hint(body.sentence("broker"), body.int64("topic_uid", 0), body.times("due_ms"))


def _hinted(body: Body) -> Hinted:
    return Hinted(body.tally("known"))


def _stand(body: Body) -> StatusRequest:
    topic = body.topic() if body.text("topic") else ""
    return StatusRequest(topic, body.number("limit", 1, MAX_BATCH))


def _topic_loads(part: Body) -> TopicLoads:
    return TopicLoads(
        topics=part.judged("topics", _validate_topic_names),
        next_due_ms=part.times("next_due_ms"),
        counted_ms=part.times("counted_ms"),
        **{
            name: part.int64(name, 0, MAX_COUNT)
            for name in ("available", "waiting", "consumers", "in_flight", "credit", "delivered", "redelivered")
        },
        buckets=part.optional_counts("buckets"),
        dealt=part.optional_counts("dealt"),
    )


def _consumers(part: Body) -> Consumers:
    health = part.uint8("health")
    unknown = health >= len(Health)
    if unknown.any():
        if not part.lenient:
            raise part.refusal("health", f"has a value above {len(Health) - 1}")
        health = np.where(unknown, np.uint8(Health.SILENT), health)
    return Consumers(
        topics=part.judged("topics", _validate_topic_names),
        consumers=part.judged("consumers", lambda column: validate_texts(column, "a consumer", 1, MAX_HOLDER_BYTES)),
        health=health,
        credit_messages=part.int64("credit_messages", 0, MAX_COUNT),
        credit_bytes=part.int64("credit_bytes", 0, MAX_COUNT),
        in_flight=part.int64("in_flight", 0, MAX_COUNT),
    )


def _standing(body: Body) -> BrokerStatus:
    late = body.part("lateness", "LatenessCounts")
    return BrokerStatus(
        broker=body.sentence("broker"),
        version=body.sentence("version"),
        now_ms=body.time("now_ms"),
        started_ms=body.time("started_ms"),
        trouble=body.sentence("trouble"),
        store=body.sentence("store"),
        store_ms=body.reading("store_ms"),
        topics=_topic_loads(body.part("topics", "TopicLoads")),
        lateness=LatenessCounts(
            late.judged("topics", _validate_topic_names), late.times("up_to_ms"), late.int64("counts", 0, MAX_COUNT)
        ),
        consumers=_consumers(body.part("consumers", "Consumers")),
        sync=body.sentence("sync"),
        warnings=tuple(sentence.decode() for sentence in body.judged("warnings", validate_reasons)),
    )


QUESTION_READERS: dict[str, Callable[[Body], Frame]] = {
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
    "StatusRequest": _stand,
    "BrokerStatus": _standing,
    "Hint": _hint,
    "Hinted": _hinted,
}
