"""Each answer of a receiver, and what it means for the message."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.gateway.push.settlement import (
    MOST_RETRY_AFTER_MS,
    Settlement,
    Verb,
    retry_after_ms,
    settlement_of,
    unanswered,
)

NOW_MS = 1_700_000_000_000
MAX_LEASE_MS = 3_600_000


def judged(status: int, body: bytes = b"", **headers: str) -> Settlement:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return settlement_of(status, named, body, NOW_MS, MAX_LEASE_MS)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_acknowledges(status: int) -> None:
    assert judged(status, b"thanks") == Settlement(Verb.ACK)


def test_202_with_a_lease_keeps_it_up_to_what_the_topic_permits() -> None:
    assert judged(202, timeline_lease="10m") == Settlement(Verb.KEEP, lease_ms=600_000)
    assert judged(202, timeline_lease="600") == Settlement(Verb.KEEP, lease_ms=600_000)
    assert judged(202, timeline_lease=" 2d ") == Settlement(Verb.KEEP, lease_ms=MAX_LEASE_MS)
    assert judged(200, timeline_lease="10m").verb is Verb.ACK


@pytest.mark.parametrize("lease", ["", "soon", "-1s", "0s", "9" * 400, "1m; x"])
def test_a_lease_that_cannot_be_read_is_no_ack(lease: str) -> None:
    outcome = judged(202, timeline_lease=lease)
    assert outcome.verb is Verb.RELEASE and outcome.wait_ms is None and "Timeline-Lease" in outcome.reason


def test_410_buries_with_the_reason() -> None:
    assert judged(410, b"no such customer") == Settlement(Verb.BURY, "410: no such customer", status=410)
    assert judged(410) == Settlement(Verb.BURY, "410", status=410)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_decides_when(status: int) -> None:
    assert judged(status, retry_after="120").wait_ms == 120_000
    date = format_datetime(datetime.fromtimestamp(NOW_MS / 1000 + 90, UTC), usegmt=True)
    assert judged(status, retry_after=date).wait_ms == 90_000
    assert judged(status).wait_ms is None
    assert judged(status, retry_after="0").wait_ms == 0
    assert judged(status, retry_after="in a while").wait_ms is None


@pytest.mark.parametrize("status", [100, 301, 302, 307, 400, 401, 404, 408, 418, 500, 502, 504, 600])
def test_anything_else_releases_with_the_topics_backoff(status: int) -> None:
    outcome = judged(status, b"oops", retry_after="5")
    assert (outcome.verb, outcome.wait_ms) == (Verb.RELEASE, None)
    assert outcome.reason.startswith(f"{status}: ")
    assert outcome.broken is (500 <= status < 600)


def test_no_answer_releases_and_counts_against_the_receiver() -> None:
    assert unanswered("no answer within 30s") == Settlement(Verb.RELEASE, "no answer within 30s", broken=True)


def test_the_last_delivery_buries_with_the_last_answer() -> None:
    outcome = judged(503, b"down", retry_after="5")
    assert outcome.last(24, 25) == outcome == outcome.last(1_000, 0)
    assert outcome.last(25, 25) == Settlement(Verb.BURY, "max_deliveries: 503: down", broken=True, status=503)
    assert judged(200).last(25, 25).verb is Verb.ACK
    assert judged(202, timeline_lease="1m").last(25, 25).verb is Verb.KEEP


@given(st.binary(max_size=3_000), st.sampled_from([410, 418, 500]))
def test_a_reason_always_fits(body: bytes, status: int) -> None:
    for outcome in (judged(status, body), judged(status, body).last(9, 9)):
        assert len(outcome.reason.encode()) <= 1024 and "\0" not in outcome.reason


@given(st.text(max_size=80))
def test_no_retry_after_is_beyond_a_day_or_an_error(text: str) -> None:
    wait_ms = retry_after_ms(text, NOW_MS)
    assert wait_ms is None or 0 <= wait_ms <= MOST_RETRY_AFTER_MS


@pytest.mark.parametrize(
    "text", ["99999999999999", "Fri, 31 Dec 9999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:59 GMT", "²", "1e3", "-5"]
)
def test_odd_retry_afters(text: str) -> None:
    wait_ms = retry_after_ms(text, NOW_MS)
    assert wait_ms in (None, 0, MOST_RETRY_AFTER_MS)
