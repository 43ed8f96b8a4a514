"""One frame of each kind with everything in it, and its barest form: fixed, for goldens, other encoders and mutants."""

from __future__ import annotations

from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import (
    MAX_TIME_MS,
    ROW_DTYPES,
    Answers,
    Operation,
    Rows,
    State,
    Topic,
    TopicSettings,
    encode_headers,
)
from timeline.wire import frames

NOW_MS = 1_700_000_000_000


def longs(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def ulongs(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def uints(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def ubytes(*values: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(values, np.uint8)


def produce(count: int = 3) -> frames.Produce:
    return frames.Produce(
        request=7,
        topic="departures",
        group="ops",
        ids=Ragged.of([f"UA{index}-é".encode() for index in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        time_ms=np.full(count, NOW_MS, np.int64),
        flags=np.arange(count, dtype=np.uint8) % 8,
        payloads=Ragged.of([b"gate closes"] * count),
    )


def full_produce() -> frames.Produce:
    frame = produce()
    frame.expires_ms = longs(0, NOW_MS + 1, 60_000)
    frame.tags = Ragged.of([b"spring", b"", "été".encode()])
    frame.headers = Ragged.of([b"", encode_headers({"a": "1", "b": ""}), encode_headers({"é": "ü"})])
    frame.timeout_ms = 5_000
    return frame


def answers() -> Answers:
    return Answers(
        status=ubytes(0, 10, 6),
        version=longs(1, 2, 0),
        due_ms=longs(NOW_MS, NOW_MS + 1, 0),
        settled=ubytes(0, 1, 0),
        late=ubytes(1, 0, 0),
        repeat=ubytes(0, 1, 0),
        details={0: "late", 2: "somebody leased it since"},
    )


def settle(count: int = 3) -> frames.Settle:
    return frames.Settle(
        request=8,
        ids=Ragged.of([b"m%d" % index for index in range(count)]),
        birth=np.full(count, 2**64 - 1, np.uint64),
        version=np.full(count, 3, np.int64),
        operation=(np.arange(count) % 4 + 2).astype(np.uint8),
        time_ms=np.full(count, 30_000, np.int64),
        flags=(np.arange(count) % 4).astype(np.uint8),
        op=np.arange(1, count + 1, dtype=np.uint64),
    )


def full_settle() -> frames.Settle:
    frame = settle()
    frame.reasons = Ragged.of([b"", b"", "trop tôt".encode()])
    frame.credit_messages, frame.credit_bytes = 3, 4096
    return frame


def deliver() -> frames.Deliver:
    return frames.Deliver(
        leased_ms=NOW_MS,
        pushed_ms=NOW_MS + 1,
        ids=Ragged.of([b"a", b"bb"]),
        birth=ulongs(1, 2**63),
        version=longs(2, 9),
        due_ms=longs(NOW_MS - 5, NOW_MS),
        scheduled_ms=longs(NOW_MS - 5, NOW_MS - 60_000),
        lease_until_ms=longs(NOW_MS + 30_000, NOW_MS + 30_000),
        deliveries=uints(1, 8),
        payload_sum=ulongs(3421780262, 1),
        payloads=Ragged.of([b"123456789", b""]),
    )


def full_deliver() -> frames.Deliver:
    frame = deliver()
    frame.headers = Ragged.of([encode_headers({"a": "1"}), b""])
    frame.tags = Ragged.of([b"", b"spring"])
    return frame


def taken_deliver() -> frames.Deliver:
    """The answer to a Take."""
    frame = full_deliver()
    frame.max_deliveries, frame.holder = 25, "pull:b1:5ad0c1e2"
    return frame


def retried_deliver() -> frames.Deliver:
    """Of a topic with retry settings of its own."""
    frame = taken_deliver()
    frame.retry_first_ms, frame.retry_factor_percent = 0, 150
    frame.retry_cap_ms, frame.retry_jitter_percent = 60_000, 0
    return frame


def pushed_topic() -> frames.TopicList:
    """A topic with webhooks, and its secrets."""
    settings = TopicSettings(
        retry_first_ms=0, retry_factor_percent=150, retry_cap_ms=60_000, retry_jitter_percent=0,
        push_url="https://[::1]:8443/x?y=%20", push_timeout_ms=5_000, push_concurrency=8, push_rate=20,
    )  # fmt: skip
    return frames.TopicList(0, "", (Topic("spring", 5, settings, 9, 1),), ("whsec_AAAA", "whsec_/+8="))


def called_settle() -> frames.Settle:
    """One that is a call of its own."""
    frame = settle(2)
    frame.topic, frame.holder = "departures", "pull:b1:5ad0c1e2"
    return frame


def rows(payload: bool) -> Rows:
    numbers: dict[str, Any] = {name: np.array([1, 2], kind) for name, kind in ROW_DTYPES.items()}
    return Rows(
        ids=Ragged.of([b"a", b"b"]),
        groups=Ragged.of([b"ops", b"default"]),
        holders=Ragged.of([b"worker-1", b""]),
        tags=Ragged.of([b"", b"spring"]),
        dead=Ragged.of([b"", b"too many deliveries"]),
        payloads=Ragged.of([b"x", b"yy"]) if payload else None,
        headers=Ragged.of([b"", encode_headers({"k": "v"})]) if payload else None,
        **numbers,
    )


def topic_list() -> frames.TopicList:
    odd = TopicSettings(buckets=8, paused=True, lease_ahead_ms=0, max_rate_per_s=5)
    return frames.TopicList(
        status=0,
        detail="",
        topics=(Topic("departures", 2**63 - 1, TopicSettings(), 1, NOW_MS), Topic("spring sale", 5, odd, 9, 1)),
    )


def late_list() -> frames.LateList:
    return frames.LateList(
        topics=Ragged.of([b"departures"]),
        ids=Ragged.of([b"UA1545"]),
        consumers=Ragged.of([b""]),
        due_ms=longs(NOW_MS),
        delivered_ms=longs(NOW_MS + 70),
        cause=ubytes(3),
        dropped=2,
        now_ms=NOW_MS,
    )


def standing() -> frames.BrokerStatus:
    return frames.BrokerStatus(
        broker="b1",
        version="0.1.0",
        now_ms=NOW_MS,
        started_ms=NOW_MS - 60_000,
        trouble="the store is down: disk full",
        store="sqlite:///timeline.db",
        store_ms=1.75,
        topics=frames.TopicLoads(
            topics=Ragged.of([b"departures", b"spring sale"]),
            available=longs(3, 0),
            waiting=longs(10_000_000, 0),
            next_due_ms=longs(NOW_MS + 5, 0),
            counted_ms=longs(NOW_MS - 900, 0),
            consumers=longs(2, 0),
            in_flight=longs(7, 0),
            credit=longs(93, 0),
            delivered=longs(1_000, 0),
            redelivered=longs(1, 0),
        ),
        lateness=frames.LatenessCounts(
            topics=Ragged.of([b"departures", b"departures"]), up_to_ms=longs(1, MAX_TIME_MS), counts=longs(998, 2)
        ),
        consumers=frames.Consumers(
            topics=Ragged.of([b"departures", b"departures"]),
            consumers=Ragged.of([b"worker-1", "père".encode()]),
            health=ubytes(0, 3),
            credit_messages=longs(93, 0),
            credit_bytes=longs(1 << 20, 0),
            in_flight=longs(7, 0),
        ),
    )


def bare_standing() -> frames.BrokerStatus:
    none, no = Ragged.of([]), longs()
    return frames.BrokerStatus(
        "", "", 0, 0, "", "", 0.0,
        frames.TopicLoads(none, no, no, no, no, no, no, no, no, no),
        frames.LatenessCounts(none, no, no),
        frames.Consumers(none, none, ubytes(), no, no, no),
    )  # fmt: skip


def clustered_standing() -> frames.BrokerStatus:
    """With what 1.2 added."""
    made = standing()
    made.sync = "etcd://h1:2379/timeline: 3 members"
    made.topics.buckets, made.topics.dealt = longs(64, 1), longs(21, 0)
    return made


def warned_standing() -> frames.BrokerStatus:
    """With what 1.3 added."""
    made = clustered_standing()
    made.warnings = ("fsync is off: a crash of the machine may lose everything; set it to on", "père")
    return made


_MOVE, _CANCEL = Operation.MOVE, Operation.CANCEL
_TWO = Ragged.of([b"a", b"b"])

SAMPLES: list[frames.Frame] = [
    full_produce(),
    produce(0),
    frames.Produced(7, answers(), 250),
    frames.Produced(7, Answers.blank(0)),
    frames.Mutate("departures", "ops", _MOVE, _TWO, longs(NOW_MS, 60_000), ubytes(0, 1), longs(0, 3), ulongs(1, 2), 5),
    frames.Mutate("t", "g", Operation.PURGE, Ragged.of([]), longs(), ubytes(), longs(), ulongs()),
    frames.MutateTag("departures", "ops", _MOVE, b"spring", 5, by_ms=-7, cursor=b"\0\1", started_ms=NOW_MS, limit=10),
    frames.MutateTag("departures", "ops", _CANCEL, b"spring", 5, leased=True, dry_run=True, timeout_ms=1),
    frames.Mutated(answers()),
    frames.TagMutated({0: 12, 7: 1}, b"cursor", NOW_MS, NOW_MS + 1),
    frames.TagMutated({}, b"", 0),
    frames.Hello("departures", "worker-1", 2**64 - 1, 30_000, 100, 1 << 20, _TWO, ulongs(1, 2), longs(3, 4)),
    frames.Hello("t", "c", 0, 0, 0, 0, Ragged.of([]), ulongs(), longs()),
    frames.Credit(5, 1000, 7),
    frames.Credit(),
    full_settle(),
    settle(1),
    frames.Welcome("b1", NOW_MS, 30_000, 43_200_000, 1 << 20, 1_000, ("b1:9000", "b2:9000")),
    frames.Welcome("", 0, 1, 1, 0, 1),
    full_deliver(),
    deliver(),
    frames.Settled(8, answers(), NOW_MS),
    frames.Beat(NOW_MS, 7),
    frames.Leaving(frames.LeavingReason.SUPERSEDED, "another session has this consumer's id"),
    frames.Leaving(frames.LeavingReason.DRAINING),
    frames.Scan("departures", (State.WAITING, State.DEAD), b"spring", 1, NOW_MS, None, True, b"here", 50),
    frames.Scan("departures", ids=_TWO),
    frames.ScanPage(rows(True), NOW_MS, b"on"),
    frames.ScanPage(rows(False), NOW_MS, b""),
    frames.Forecast("departures", 3_600_000, 60_000),
    frames.Forecasted(longs(NOW_MS, NOW_MS + 1, NOW_MS + 2), longs(5, 0), 3, True),
    frames.Topics(frames.TopicAction.CREATE, "spring", {"lease_ms": -5, "paused": True, "kind": "timeline"}, 0),
    frames.Topics(frames.TopicAction.LIST),
    topic_list(),
    frames.TopicList(4, "there is no topic 'x'", ()),
    frames.Late(NOW_MS, "departures", b"UA1545", 10),
    frames.Late(),
    late_list(),
    frames.Ping(1_700_000_000_000.5),
    frames.Pong(1_700_000_000_000.5, 1_700_000_000_001.25, 1_700_000_000_002.0, "b1", "0.1.0"),
    frames.StatusRequest("departures", 50),
    frames.StatusRequest(),
    standing(),
    bare_standing(),
    frames.Hint("b1", longs(2**63 - 1, 5), longs(NOW_MS, 0)),
    frames.Hint("b1", longs(), longs()),
    frames.Hinted(2),
    frames.Hinted(),
    frames.Pong(1.5, 2.5, 3.5, "b1", "0.1.0", ("b1:9000", "b2:9000")),
    clustered_standing(),
    frames.Credit(0, 0, 9, -3.25, 0.5),
    frames.Pong(1.5, 2.5, 3.5, "b1", "0.1.0", ("b1:9000",), -3_600_000.25),
    frames.Scan("departures", bucket_from=16, bucket_to=4096),
    frames.Scan("departures", payload=True, cursor=b"here", holder="stream/7/1"),
    warned_standing(),
    frames.Take("departures", 100, 65_536, 20_000, 60_000),
    frames.Take("departures"),
    taken_deliver(),
    called_settle(),
    retried_deliver(),
    pushed_topic(),
    frames.Topics(frames.TopicAction.SECRETS, "spring"),
    frames.Topics(frames.TopicAction.ROTATE, "spring"),
    frames.Credit(5, 1000, room_messages=256),
    frames.ScheduleCall(
        frames.ScheduleAction.BACKFILL,
        "departures",
        "hourly",
        '{"cron": ["0 * * * *"]}',
        7,
        NOW_MS,
        NOW_MS + 1,
        True,
        True,
        2**64 - 1,
        b"here",
        10,
    ),
    frames.ScheduleCall(frames.ScheduleAction.LIST),
    frames.ScheduleAnswer(0, "été", '[{"topic": "departures"}]', b"on", {"produced": 24, "failed": 0}),
    frames.ScheduleAnswer(4, "there is no schedule 'x'"),
    frames.Hint("b1", longs(1, 2), longs(5, 6), Ragged.of([b"", b"w"]), ulongs(0, 2**64 - 1), Ragged.of([b"", b"ops"])),
]
