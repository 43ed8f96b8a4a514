"""Hypothesis strategies: any frame of each kind, with the edges of every range in it."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from hypothesis import strategies as st

from timeline.columns import Ragged
from timeline.model import (
    MAX_BATCH,
    MAX_BUCKETS,
    MAX_DURATION_MS,
    MAX_HEADERS_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TIME_MS,
    MUTATIONS,
    ROW_DTYPES,
    SETTING_RANGES,
    Answers,
    LateCause,
    Operation,
    Rows,
    State,
    Topic,
    TopicSettings,
    encode_headers,
)
from timeline.wire import frames

MAX_COUNT = 2**53 - 1

times = st.sampled_from([0, 1, MAX_TIME_MS]) | st.integers(0, MAX_TIME_MS)
durations = st.sampled_from([0, 1, MAX_DURATION_MS]) | st.integers(0, MAX_DURATION_MS)
counts = st.sampled_from([0, 1, MAX_COUNT]) | st.integers(0, MAX_COUNT)
whole64 = st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
some64 = st.sampled_from([1, 2**63, 2**64 - 1]) | st.integers(1, 2**64 - 1)
uids = st.integers(0, 2**63 - 1)
versions = st.sampled_from([1, 2, 2**63 - 1]) | st.integers(1, 2**63 - 1)
whole32 = st.sampled_from([0, 1, 2**32 - 1]) | st.integers(0, 2**32 - 1)
clock_readings = st.floats(0, MAX_TIME_MS)
differences = st.just(-1.0) | st.floats(-MAX_TIME_MS, MAX_TIME_MS)

any_character = st.characters(codec="utf-8")
characters = st.characters(codec="utf-8", exclude_characters="\0")


def texts(least: int, most_bytes: int, alphabet: st.SearchStrategy[str] = any_character) -> st.SearchStrategy[str]:
    """Strings of up to `most_bytes` bytes of UTF-8, the longest too."""
    short = st.text(alphabet, min_size=least, max_size=12).filter(lambda text: len(text.encode()) <= most_bytes)
    longest = st.sampled_from(["x" * most_bytes, "é" * (most_bytes // 2)])
    return short | longest if most_bytes >= 2 else short


def encoded(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return strategy.map(str.encode)


names = texts(1, 255, characters)
topics = st.text(string.ascii_letters + " -_.é", min_size=1, max_size=10) | st.just("é" * 255)
ids = encoded(texts(1, 255, characters))
tags = encoded(texts(0, 64))
reasons = encoded(texts(0, 1024))
cursors = st.binary(max_size=20) | st.just(b"c" * 4096)
headers = (
    st.dictionaries(texts(0, 40), texts(0, 40), max_size=3).map(encode_headers)
    | st.just(b"")
    | st.just(encode_headers({"k": "v" * (MAX_HEADERS_BYTES - 5)}))
)
payloads = st.binary(max_size=30) | st.just(b"p" * 1000)
uniform = st.sampled_from([1, 2, 3, 40]).map(lambda size: b"u" * size)


def ragged(items: st.SearchStrategy[bytes], count: int) -> st.SearchStrategy[Ragged]:
    """`count` items; sometimes a slice of a longer column, so that offsets do not start at 0."""

    def sliced(listed: list[bytes]) -> Ragged:
        return Ragged.of([b"before", *listed, b"after"])[1 : count + 1]

    lists = st.lists(items, min_size=count, max_size=count)
    return lists.map(Ragged.of) | lists.map(sliced) | items.map(lambda item: Ragged.repeat(item, count))


def column(values: st.SearchStrategy[int], dtype: Any, count: int) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=count, max_size=count).map(lambda listed: np.array(listed, dtype=dtype))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def flags(kind: Any, count: int) -> st.SearchStrategy[Any]:
    return column(st.integers(0, sum(kind)), np.uint8, count)


def _one_of_both(flags: Any) -> Any:
    """Without MOVE where REPLACE is there, too: no put is asked both."""
    return np.where(flags & frames.PutFlag.REPLACE, flags & ~np.uint8(frames.PutFlag.MOVE), flags).astype(np.uint8)


sizes = st.sampled_from([0, 1, 2, 3, 40])


@st.composite
def produces(draw: st.DrawFn) -> frames.Produce:
    n = draw(sizes)
    return frames.Produce(
        request=draw(whole64),
        topic=draw(topics),
        group=draw(names),
        ids=draw(ragged(ids, n)),
        birth=draw(column(some64, np.uint64, n)),
        time_ms=draw(column(durations, np.int64, n)),
        flags=draw(flags(frames.PutFlag, n).map(_one_of_both)),
        payloads=draw(ragged(payloads | uniform, n)),
        expires_ms=draw(maybe(column(durations, np.int64, n))),
        tags=draw(maybe(ragged(tags, n))),
        headers=draw(maybe(ragged(headers, n))),
        timeout_ms=draw(durations),
    )


@st.composite
def answers(draw: st.DrawFn) -> Answers:
    n = draw(sizes)
    marked = column(st.integers(0, 1), np.uint8, n) | st.just(np.zeros(n, np.uint8))
    said = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else []
    return Answers(
        status=draw(column(st.integers(0, 13), np.uint8, n)),
        version=draw(column(versions | st.just(0), np.int64, n)),
        due_ms=draw(column(times, np.int64, n)),
        settled=draw(marked),
        late=draw(marked),
        repeat=draw(marked),
        details={index: draw(texts(0, 1024)) for index in said},
    )


@st.composite
def mutates(draw: st.DrawFn) -> frames.Mutate:
    n = draw(sizes)
    return frames.Mutate(
        topic=draw(topics),
        group=draw(names),
        operation=draw(st.sampled_from(MUTATIONS)),
        ids=draw(ragged(ids, n)),
        time_ms=draw(column(durations, np.int64, n)),
        flags=draw(flags(frames.MutateFlag, n)),
        if_version=draw(column(versions | st.just(0), np.int64, n)),
        op=draw(column(some64, np.uint64, n)),
        timeout_ms=draw(durations),
    )


mutate_tags = st.builds(
    frames.MutateTag,
    topic=topics,
    group=names,
    operation=st.sampled_from([Operation.MOVE, Operation.CANCEL]),
    tag=tags.filter(bool),
    op=whole64,
    at_ms=times,
    in_ms=durations | st.just(-1),
    by_ms=st.integers(-MAX_DURATION_MS, MAX_DURATION_MS),
    leased=st.booleans(),
    dry_run=st.booleans(),
    cursor=cursors,
    started_ms=times,
    limit=st.integers(1, MAX_BATCH),
    timeout_ms=durations,
)


@st.composite
def hellos(draw: st.DrawFn) -> frames.Hello:
    n = draw(sizes)
    return frames.Hello(
        topic=draw(topics),
        consumer=draw(names),
        session=draw(whole64),
        lease_ms=draw(durations),
        credit_messages=draw(counts),
        credit_bytes=draw(counts),
        ids=draw(ragged(ids, n)),
        birth=draw(column(whole64, np.uint64, n)),
        version=draw(column(versions, np.int64, n)),
        room_messages=draw(counts),
        room_bytes=draw(counts),
    )


@st.composite
def settles(draw: st.DrawFn) -> frames.Settle:
    n = draw(sizes)
    kinds = st.sampled_from([Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY])
    return frames.Settle(
        request=draw(whole64),
        ids=draw(ragged(ids, n)),
        birth=draw(column(whole64, np.uint64, n)),
        version=draw(column(versions, np.int64, n)),
        operation=draw(column(kinds, np.uint8, n)),
        time_ms=draw(column(durations, np.int64, n)),
        flags=draw(flags(frames.SettleFlag, n)),
        op=draw(column(some64, np.uint64, n)),
        reasons=draw(maybe(ragged(reasons, n))),
        credit_messages=draw(counts),
        credit_bytes=draw(counts),
        topic=draw(topics | st.just("")),
        holder=draw(names | st.just("")),
    )


takes = st.builds(
    frames.Take,
    topic=topics,
    max_messages=st.integers(1, frames.MAX_TAKE_MESSAGES),
    max_bytes=st.integers(1, frames.MAX_TAKE_BYTES),
    wait_ms=st.integers(0, frames.MAX_TAKE_WAIT_MS),
    lease_ms=durations,
)


schedule_calls = st.builds(
    frames.ScheduleCall,
    action=st.sampled_from(frames.ScheduleAction),
    topic=topics | st.just(""),
    name=texts(0, 40),
    body=texts(0, 40) | st.just("{}" * 5_000),
    revision=uids,
    **dict.fromkeys(("from_ms", "to_ms"), times),
    **dict.fromkeys(("keep", "dry_run"), st.booleans()),
    op=whole64,
    cursor=cursors,
    limit=st.integers(0, frames.MAX_SCHEDULES_LIMIT),
)


addresses = st.lists(texts(1, 1024, characters), max_size=3).map(tuple)

welcomes = st.builds(
    frames.Welcome,
    broker=texts(0, 1024),
    now_ms=times,
    lease_ms=durations,
    max_lease_ms=durations,
    max_payload_bytes=st.sampled_from([0, MAX_PAYLOAD_BYTES]),
    heartbeat_ms=durations,
    brokers=addresses,
)


@st.composite
def delivers(draw: st.DrawFn) -> frames.Deliver:
    n = draw(sizes)
    return frames.Deliver(
        leased_ms=draw(times),
        pushed_ms=draw(times),
        ids=draw(ragged(ids, n)),
        birth=draw(column(whole64, np.uint64, n)),
        version=draw(column(versions, np.int64, n)),
        due_ms=draw(column(times, np.int64, n)),
        scheduled_ms=draw(column(times, np.int64, n)),
        lease_until_ms=draw(column(times, np.int64, n)),
        deliveries=draw(column(whole32, np.uint32, n)),
        payload_sum=draw(column(whole64, np.uint64, n)),
        payloads=draw(ragged(payloads | uniform, n)),
        headers=draw(maybe(ragged(headers, n))),
        tags=draw(maybe(ragged(tags, n))),
        max_deliveries=draw(whole32),
        holder=draw(names | st.just("")),
    )


scans = st.builds(
    frames.Scan,
    topic=topics,
    states=st.lists(st.sampled_from(State), unique=True).map(tuple),
    tag=tags,
    **dict.fromkeys(("due_from_ms", "due_to_ms"), times),
    ids=maybe(sizes.flatmap(lambda n: ragged(ids, n))),
    payload=st.booleans(),
    cursor=cursors,
    limit=counts,
    **dict.fromkeys(("bucket_from", "bucket_to"), st.integers(0, MAX_BUCKETS)),
    holder=names | st.just(""),
)

_ROW_VALUES = {
    "version": versions,
    "payload_bytes": st.sampled_from([0, MAX_PAYLOAD_BYTES]),
    "deliveries": whole32,
    "birth": whole64,
    "last_op": whole64,
    "payload_sum": whole64,
}


some_holders = encoded(texts(0, 255, characters))


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    n = draw(sizes)
    numbers = {name: draw(column(_ROW_VALUES.get(name, times), kind, n)) for name, kind in ROW_DTYPES.items()}
    with_payload = draw(st.booleans())
    return Rows(
        ids=draw(ragged(ids, n)),
        groups=draw(ragged(encoded(names), n)),
        holders=draw(ragged(some_holders, n)),
        tags=draw(ragged(tags, n)),
        dead=draw(ragged(reasons, n)),
        payloads=draw(ragged(payloads, n)) if with_payload else None,
        headers=draw(ragged(headers, n)) if with_payload else None,
        **numbers,
    )


@st.composite
def forecasteds(draw: st.DrawFn) -> frames.Forecasted:
    n = draw(sizes)
    edges = np.array(sorted(draw(st.lists(times, min_size=n + 1, max_size=n + 1))), np.int64)
    return frames.Forecasted(edges, draw(column(counts, np.int64, n)), draw(counts), draw(st.booleans()))


setting_values = st.integers(-(2**63), 2**63 - 1) | st.booleans() | texts(0, 1024)
settings = st.builds(
    TopicSettings,
    lease_ms=st.integers(1, 1000),
    max_lease_ms=st.integers(1000, MAX_DURATION_MS),
    paused=st.booleans(),
    retry_first_ms=st.integers(0, 1000),
    retry_cap_ms=st.integers(1000, MAX_DURATION_MS),
    push_url=st.just("") | st.text("abz09-._~%/?=&", max_size=900).map("https://example.com:8443/{}".format),
    **{
        name: st.integers(low, high)
        for name, (low, high) in SETTING_RANGES.items()
        if name not in ("lease_ms", "max_lease_ms", "retry_first_ms", "retry_cap_ms")
    },
)
topic_records = st.builds(Topic, name=topics, uid=uids, settings=settings, revision=versions, created_ms=times)


@st.composite
def late_lists(draw: st.DrawFn) -> frames.LateList:
    n = draw(sizes)
    return frames.LateList(
        topics=draw(ragged(encoded(topics), n)),
        ids=draw(ragged(ids, n)),
        consumers=draw(ragged(encoded(texts(0, 255, characters)), n)),
        due_ms=draw(column(times, np.int64, n)),
        delivered_ms=draw(column(times, np.int64, n)),
        cause=draw(column(st.sampled_from(LateCause), np.uint8, n)),
        dropped=draw(counts),
        now_ms=draw(times),
    )


@st.composite
def topic_loads(draw: st.DrawFn) -> frames.TopicLoads:
    n = draw(sizes)
    numbers = ("available", "waiting", "consumers", "in_flight", "credit", "delivered", "redelivered")
    return frames.TopicLoads(
        topics=draw(ragged(encoded(topics), n)),
        next_due_ms=draw(column(times, np.int64, n)),
        counted_ms=draw(column(times, np.int64, n)),
        **{name: draw(column(counts, np.int64, n)) for name in numbers},
        buckets=draw(maybe(column(counts, np.int64, n))),
        dealt=draw(maybe(column(counts, np.int64, n))),
    )


@st.composite
def lateness_counts(draw: st.DrawFn) -> frames.LatenessCounts:
    n = draw(sizes)
    return frames.LatenessCounts(
        draw(ragged(encoded(topics), n)), draw(column(times, np.int64, n)), draw(column(counts, np.int64, n))
    )


@st.composite
def connected(draw: st.DrawFn) -> frames.Consumers:
    n = draw(sizes)
    return frames.Consumers(
        topics=draw(ragged(encoded(topics), n)),
        consumers=draw(ragged(encoded(names), n)),
        health=draw(column(st.sampled_from(frames.Health), np.uint8, n)),
        **{name: draw(column(counts, np.int64, n)) for name in ("credit_messages", "credit_bytes", "in_flight")},
    )


FRAMES: dict[type, st.SearchStrategy[Any]] = {
    frames.Produce: produces(),
    frames.Produced: st.builds(frames.Produced, whole64, answers(), durations),
    frames.Mutate: mutates(),
    frames.MutateTag: mutate_tags,
    frames.Mutated: st.builds(frames.Mutated, answers(), durations),
    frames.TagMutated: st.builds(
        frames.TagMutated, st.dictionaries(st.integers(0, 255), counts, max_size=5), cursors, times, times
    ),
    frames.Hello: hellos(),
    frames.Credit: st.builds(frames.Credit, counts, counts, whole64, differences, differences),
    frames.Settle: settles(),
    frames.Welcome: welcomes,
    frames.Deliver: delivers(),
    frames.Settled: st.builds(frames.Settled, whole64, answers(), times),
    frames.Beat: st.builds(frames.Beat, times, whole64),
    frames.Leaving: st.builds(frames.Leaving, st.sampled_from(frames.LeavingReason), texts(0, 1024)),
    frames.Scan: scans,
    frames.ScanPage: st.builds(frames.ScanPage, rows(), times, cursors),
    frames.Forecast: st.builds(frames.Forecast, topics, st.integers(1, 10_000), st.integers(1, MAX_DURATION_MS)),
    frames.Forecasted: forecasteds(),
    frames.Topics: st.builds(
        frames.Topics,
        st.sampled_from(frames.TopicAction),
        topics,
        st.dictionaries(texts(1, 64, characters), setting_values, max_size=4),
        st.integers(0, 2**63 - 1),
    ),
    frames.TopicList: st.builds(
        frames.TopicList,
        st.integers(0, 13),
        texts(0, 1024),
        st.lists(topic_records, max_size=3).map(tuple),
        st.lists(st.text("abzABZ09+/=_", min_size=1, max_size=256), max_size=3).map(tuple),
    ),
    frames.Late: st.builds(frames.Late, times, topics | st.just(""), ids | st.just(b""), st.integers(1, MAX_BATCH)),
    frames.LateList: late_lists(),
    frames.Ping: st.builds(frames.Ping, clock_readings),
    frames.Pong: st.builds(frames.Pong, *[clock_readings] * 3, texts(0, 1024), texts(0, 1024), addresses, differences),
    frames.StatusRequest: st.builds(frames.StatusRequest, topics | st.just(""), st.integers(1, MAX_BATCH)),
    frames.BrokerStatus: st.builds(
        frames.BrokerStatus,
        *(texts(0, 1024), texts(0, 1024), times, times, texts(0, 1024), texts(0, 1024), clock_readings),
        *(topic_loads(), lateness_counts(), connected(), texts(0, 1024)),
        st.lists(texts(0, 1024), max_size=3).map(tuple),
    ),
    frames.Hint: sizes.flatmap(
        lambda n: st.builds(
            frames.Hint,
            *(texts(0, 1024), column(uids, np.int64, n), column(times, np.int64, n)),
            *(
                st.none() | each
                for each in (ragged(some_holders, n), column(whole64, np.uint64, n), ragged(some_holders, n))
            ),
        )
    ),
    frames.Hinted: st.builds(frames.Hinted, counts),
    frames.Take: takes,
    frames.ScheduleCall: schedule_calls,
    frames.ScheduleAnswer: st.builds(
        frames.ScheduleAnswer,
        *(st.integers(0, 13), texts(0, 1024), texts(0, 40), cursors),
        st.dictionaries(texts(1, 64, characters), counts, max_size=4),
    ),
}
"""A strategy for each kind of frame."""
