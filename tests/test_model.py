"""The nouns: statuses, checksums, headers, rows and answers as columns, topics and their settings."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import (
    FIXED_SETTINGS,
    MAX_DURATION_MS,
    MAX_PAYLOAD_BYTES,
    MUTATIONS,
    ROW_DTYPES,
    SETTING_RANGES,
    SETTLES,
    Answers,
    Displaced,
    Operation,
    Rows,
    Status,
    TopicSettings,
    bucket_of,
    buckets_of,
    canonical_headers,
    check_new_push_url,
    check_new_topic_name,
    check_topic_name,
    decode_headers,
    encode_headers,
    payload_sum,
    payload_sums,
)


# --- statuses and operations: numbers that lie on disks and wires never change ---------------------------------------
def test_a_status_keeps_its_number() -> None:
    numbers = {
        "OK": 0,
        "INVALID": 1,
        "TOO_LARGE": 2,
        "THROTTLED": 3,
        "NOT_FOUND": 4,
        "FORBIDDEN": 5,
        "FENCED": 6,
        "LEASED": 7,
        "DEAD": 8,
        "EXISTS": 9,
        "DUPLICATE": 10,
        "EXPIRED": 11,
        "UNAVAILABLE": 12,
        "UNKNOWN": 13,
    }
    assert {status.value: status.code for status in Status} == numbers
    assert all(Status.of(status.code) is status for status in Status)


@pytest.mark.parametrize("number", [-1, 14, 255])
def test_a_status_of_a_newer_version_reads_as_unknown(number: int) -> None:
    assert Status.of(number) is Status.UNKNOWN


def test_an_operation_keeps_its_number_and_is_of_one_kind() -> None:
    names = ["PUT", "LEASE", "EXTEND", "ACK", "RELEASE", "BURY", "MOVE", "CANCEL", "REVIVE", "PURGE", "REGRANT"]
    assert [operation.name for operation in sorted(Operation)] == names
    assert [int(operation) for operation in sorted(Operation)] == list(range(11))
    assert {*SETTLES, *MUTATIONS, Operation.PUT, Operation.LEASE} == set(Operation)
    assert not set(SETTLES) & set(MUTATIONS)


# --- buckets and checksums -----------------------------------------------------------------------------------------
# CRC-32 as zlib, PNG and Ethernet have it: "123456789" is its published check value.
VECTORS = [
    (b"123456789", 0xCBF43926),
    (b"a", 0xE8B7BE43),
    (b"", 0),
    (b"UA1545", 0x0FBCC675),
    ("é".encode(), 0x0E048D3E),
]


@pytest.mark.parametrize(("id", "crc"), VECTORS)
@pytest.mark.parametrize("buckets", [1, 64, 100, 4096])
def test_the_bucket_of_an_id(id: bytes, crc: int, buckets: int) -> None:
    assert bucket_of(id, buckets) == crc % buckets


@pytest.mark.slow
@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 4096))
def test_buckets_of_a_column(ids: list[bytes], buckets: int) -> None:
    told = buckets_of(Ragged.of(ids), buckets)
    assert told.tolist() == [bucket_of(id, buckets) for id in ids]
    assert told.dtype == np.uint32


def test_the_checksum_has_the_payload_below_and_the_headers_above() -> None:
    assert payload_sum(b"123456789") == 0xCBF43926
    assert payload_sum(b"123456789", b"a") == 0xE8B7BE43_CBF43926
    assert payload_sum(memoryview(b"123456789"), memoryview(b"a")) == 0xE8B7BE43_CBF43926
    assert payload_sum(b"") == payload_sum(b"", b"") == 0


@pytest.mark.slow
@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=9))
def test_checksums_of_columns(content: list[tuple[bytes, bytes]]) -> None:
    payloads, headers = Ragged.of([one for one, _ in content]), Ragged.of([other for _, other in content])
    assert payload_sums(payloads, headers).tolist() == [payload_sum(*pair) for pair in content]
    assert payload_sums(payloads, None).tolist() == [payload_sum(one) for one, _ in content]
    assert payload_sums(payloads, None).dtype == payload_sums(payloads, headers).dtype == np.uint64


# --- headers -------------------------------------------------------------------------------------------------------
texts = st.text(st.characters(codec="utf-8"), max_size=6)


@pytest.mark.slow
@given(st.dictionaries(texts, texts, max_size=5))
@example({"": ""})
def test_headers_come_back(headers: dict[str, str]) -> None:
    data = encode_headers(headers)
    assert decode_headers(data) == headers
    assert canonical_headers(data)
    assert encode_headers(dict(reversed(headers.items()))) == data


def test_headers_as_another_language_must_write_them() -> None:
    assert encode_headers({}) == b""
    assert encode_headers({"b": "2", "a": "é"}) == b"\x01\x00a\x02\x00\xc3\xa9\x01\x00b\x01\x002"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x01", "middle"),
        (b"\x02\x00a", "middle"),
        (b"\x01\x00a\x05\x00b", "middle"),
        (b"\xff\xff", "middle"),
        (b"\x01\x00a", "a key without a value"),
        (b"\x01\x00\xff\x00\x00", "not UTF-8"),
        (b"\x03\x00\xed\xa0\x80\x00\x00", "not UTF-8"),
    ],
)
def test_malformed_headers_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        decode_headers(data)
    with pytest.raises(Invalid, match=says):
        canonical_headers(data)


@given(st.binary(max_size=24))
def test_any_bytes_are_headers_or_refused(data: bytes) -> None:
    try:
        headers = decode_headers(data)
    except Invalid:
        return
    assert canonical_headers(data) == (encode_headers(headers) == data)
    assert decode_headers(encode_headers(headers)) == headers


def test_headers_out_of_order_or_said_twice_are_not_canonical() -> None:
    a, b = encode_headers({"a": "1"}), encode_headers({"b": "2"})
    assert canonical_headers(a + b)
    assert not canonical_headers(b + a)
    assert not canonical_headers(a + a)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"a": "x" * 65_536}, "8192 bytes in all"),
        ({"a": 1}, "strings by strings, not int: 1"),
        ({b"a": "1"}, "strings by strings, not bytes"),
        ({"a": None}, "not NoneType"),
        ({"a": "\ud800"}, "surrogate"),
    ],
)
def test_headers_that_cannot_be_carried(headers: Any, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        encode_headers(headers)


# --- rows and answers ----------------------------------------------------------------------------------------------
RAGGED = ("ids", "groups", "holders", "tags", "dead")


def _rows(start: int, stop: int, payload: bool) -> Rows:
    numbers = range(start, stop)
    columns: dict[str, Any] = {
        name: np.array([at * 10 + place for at in numbers], dtype=dtype)
        for place, (name, dtype) in enumerate(ROW_DTYPES.items())
    }
    ragged = [*RAGGED, *(("payloads", "headers") if payload else ())]
    columns |= {name: Ragged.of([f"{name}{at}".encode() for at in numbers]) for name in ragged}
    return Rows(**columns)


def _told(rows: Rows) -> list[dict[str, Any]]:
    """The rows as a dictionary each."""
    columns = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    assert {name: column.dtype for name, column in columns.items() if isinstance(column, np.ndarray)} == ROW_DTYPES
    lists = {name: [None] * len(rows) if column is None else column.tolist() for name, column in columns.items()}
    return [{name: values[at] for name, values in lists.items()} for at in range(len(rows))]


@pytest.mark.slow
@given(st.integers(0, 5), st.booleans(), st.data())
def test_rows_taken(count: int, payload: bool, data: st.DataObject) -> None:
    rows = _rows(0, count, payload)
    told = _told(rows)
    where = data.draw(st.lists(st.integers(0, count - 1), max_size=6) if count else st.just([]))
    assert _told(rows.take(np.array(where, dtype=np.intp))) == [told[at] for at in where]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
    assert _told(rows.take(mask)) == [told[at] for at in np.flatnonzero(mask)]


@given(st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_rows_joined(counts: list[int], payload: bool) -> None:
    edges = np.cumsum([0, *counts]).tolist()
    parts = [_rows(low, high, payload) for low, high in pairwise(edges)]
    joined = Rows.concat(parts)
    assert _told(joined) == _told(_rows(0, edges[-1], payload))
    assert (joined.payloads is not None) == (payload and bool(parts))


def test_an_empty_part_takes_nothing_from_the_others() -> None:
    joined = Rows.concat([Rows.empty(), _rows(0, 2, payload=True), Rows.empty(payload=True)])
    assert _told(joined) == _told(_rows(0, 2, payload=True))
    with pytest.raises(ValueError, match="cannot be joined"):
        Rows.concat([_rows(0, 1, payload=False), _rows(1, 2, payload=True)])


def test_no_rows() -> None:
    assert _told(Rows.empty()) == _told(Rows.empty(payload=True)) == []
    assert Rows.empty().payloads is None
    assert Rows.empty(payload=True).payloads == Ragged.of([])


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_a_part_of_answers(count: int, start: int, more: int) -> None:
    whole = Answers.blank(count, Status.FENCED)
    for name, column in _columns(whole).items():
        column[:] = np.arange(count) + len(name)
    whole.details = {at: f"answer {at}" for at in range(0, count, 2)}
    whole.displaced = {at: Displaced(birth=at, version=1, expired=True) for at in range(1, count, 2)}
    part = whole.slice(start, start + more)
    assert {name: column.tolist() for name, column in _columns(part).items()} == {
        name: column[start : start + more].tolist() for name, column in _columns(whole).items()
    }
    assert {at + start: says for at, says in part.details.items()} == {
        at: says for at, says in whole.details.items() if start <= at < start + more
    }
    assert {at + start: gone for at, gone in part.displaced.items()} == {
        at: gone for at, gone in whole.displaced.items() if start <= at < start + more
    }


def _columns(answers: Answers) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(answers)]
    return {name: getattr(answers, name) for name in names if name not in ("details", "commit_seq", "displaced")}


def test_blank_answers_say_one_status_and_nothing_else() -> None:
    blank = Answers.blank(3, Status.LEASED)
    assert len(blank) == 3
    assert blank.status.tolist() == [Status.LEASED.code] * 3
    assert not any(column.any() for name, column in _columns(blank).items() if name != "status")
    assert blank.commit_seq == 0
    assert blank.displaced == {}
    assert blank.details == {} and Answers.blank(1).details is not Answers.blank(1).details


# --- topics --------------------------------------------------------------------------------------------------------
def test_the_settings_a_topic_starts_with() -> None:
    settings = TopicSettings()
    assert settings.check() is settings
    assert dataclasses.asdict(settings) == {
        "buckets": 64,
        "lease_ms": 30_000,
        "max_lease_ms": 43_200_000,
        "max_payload_bytes": 1_048_576,
        "horizon_ms": 316_224_000_000,
        "max_deliveries": 25,
        "redelivery_backoff_ms": 0,
        "dead_retention_ms": 0,
        "remember_ms": 0,
        "lease_ahead_ms": -1,
        "paused": False,
        "max_rate_per_s": 0,
        "kind": "timeline",
        "retry_first_ms": 1_000,
        "retry_factor_percent": 200,
        "retry_cap_ms": 3_600_000,
        "retry_jitter_percent": 20,
        "push_url": "",
        "push_timeout_ms": 30_000,
        "push_concurrency": 32,
        "push_rate": 0,
    }
    assert MAX_PAYLOAD_BYTES == 64 * 1_048_576
    named = {field.name for field in dataclasses.fields(settings)}
    assert set(SETTING_RANGES) | {"paused", "kind", "push_url"} == named
    assert set(FIXED_SETTINGS) <= named


def _with(name: str, value: Any) -> TopicSettings:
    """The settings with one changed, and max_lease wide enough for any lease, retry_cap for any first wait."""
    wide = TopicSettings(max_lease_ms=MAX_DURATION_MS, lease_ms=1, retry_first_ms=0, retry_cap_ms=MAX_DURATION_MS)
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(wide, **changes)


@pytest.mark.parametrize("name", SETTING_RANGES)
def test_each_setting_has_a_range(name: str) -> None:
    low, high = SETTING_RANGES[name]
    for value in (low, high):
        assert _with(name, value).check()
    for wrong in (low - 1, high + 1, float(low), True, "1", None):
        with pytest.raises(Invalid, match=f"^INVALID: {name.removesuffix('_ms')} must be ") as refused:
            _with(name, wrong).check()
        assert "_ms" not in refused.value.reason  # people type `remember`, and 30d


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (TopicSettings(lease_ms=2, max_lease_ms=1), "lease 2ms is above max_lease 1ms: raise max_lease, too"),
        (TopicSettings(paused=1), "paused must be true or false, not 1"),  # type: ignore[arg-type]
        (TopicSettings(kind="cron"), "the only kind there is"),
        (TopicSettings(retry_first_ms=2, retry_cap_ms=1), "retry_first 2ms is above retry_cap 1ms: raise retry_cap"),
        (TopicSettings(push_url="https://a/" + "x" * 1_015), "push_url takes up to 1024 bytes, not 1025"),
        (TopicSettings(push_url=7), "push_url takes printable ASCII"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_do_not_fit_together(settings: TopicSettings, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        settings.check()


@pytest.mark.parametrize("name", ["a", "departures", "é ∀ 時", "x" * 255, " ", "a/b"])
def test_a_topics_name(name: str) -> None:
    assert check_topic_name(name) == name


@pytest.mark.parametrize("name", ["a", "departures", "Orders.v2_eu-west", "x" * 255, "...", "-"])
def test_a_new_topics_name(name: str) -> None:
    assert check_new_topic_name(name) == name


@pytest.mark.parametrize("name", ["é", " ", "a/b", "a b", "~schedules", ".", "..", "a\n", "a?b", "a%20b", "$HOME"])
def test_no_new_topics_name(name: str) -> None:
    with pytest.raises(Invalid, match=r"letters, digits, '.', '_' and '-'|printable characters"):
        check_new_topic_name(name)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\n", "a\0", "\ud800", "\u202e", b"a", None])
def test_no_topics_name(name: Any) -> None:
    with pytest.raises(Invalid, match="a topic's name is 1 to 255 printable characters, not"):
        check_topic_name(name)


@pytest.mark.parametrize("url", ["http://a..b/", "http://%31.example.com/", "http://[fe80::1%25lo]/", "http://./"])
def test_a_push_url_of_older_rules_stays_readable(url: str) -> None:
    """No topic gets it any more, but a broker opens a store that has it."""
    assert TopicSettings(push_url=url).check().push_url == url
    with pytest.raises(Invalid, match="push_url has a host that is no name"):
        check_new_push_url(url)
