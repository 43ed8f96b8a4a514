"""What an audit says of journals in which something is wrong, or only looks so: each violation is called by its name,
what is explained is not, and what is not known is not called broken."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import write_events
from timeline.broker.journal.events import IDLE_MS
from timeline.pipeline.jobs.audit import Audit, Pending, audit, audit_page, not_known

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TOPIC = "jobs/é=1"
BIRTH = 7


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def event(seconds: float, kind: str, id: str | None = None, **columns: Any) -> dict[str, Any]:
    """An event of the broker b, in its first session."""
    told = {"time": at(seconds), "kind": kind, "id": id, "broker": "b", "session": "one"}
    return told | columns


def seen(seconds: float, kind: str, id: str, version: int, **columns: Any) -> dict[str, Any]:
    """One that names the life."""
    more: dict[str, Any] = {"birth": BIRTH, "version": version}
    if kind == "delivered":
        more |= {"due": at(0), "lateness": 3, "deliveries": version, "again": version > 2, "consumer": "w"}
    return event(seconds, kind, id, **more, **columns)


def put(id: str, seconds: float = 0, **columns: Any) -> dict[str, Any]:
    return seen(seconds, "put", id, 1, due=at(0), **columns)


def own(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """What the journal says of itself: a broker that ran for an hour, and `more`."""
    return [event(-5, "started", until=at(55)), *more, event(3_600, "stopped")]


def lay(spark: Any, ids: list[str], topic: str = TOPIC, since: float = 1_800) -> Pending:
    """These were on the timeline half an hour later."""
    rows = spark.createDataFrame(
        [(topic, id, BIRTH) for id in ids] + [("again", "anew", BIRTH)], "topic string, id string, birth long"
    )
    return Pending(rows, (topic, "again"), ms(at(since)), ms(at(since + 10)))


GUILTY: dict[str, list[dict[str, Any]]] = {
    "early": [put("early"), seen(1, "delivered", "early", 2) | {"lateness": -5}, seen(2, "acked", "early", 2)],
    "twice": [
        put("twice"), seen(1, "delivered", "twice", 2), seen(2, "relet", "twice", 2),
        seen(3, "delivered", "twice", 2), seen(4, "acked", "twice", 2),
    ],
    # The release was sent twice, because its answer was lost: it explains one redelivery.
    "unexplained": [
        put("unexplained"), seen(1, "delivered", "unexplained", 2), seen(1.2, "released", "unexplained", 3),
        seen(1.5, "delivered", "unexplained", 4), seen(1.7, "released", "unexplained", 3),
        seen(2, "delivered", "unexplained", 5), seen(3, "acked", "unexplained", 5),
    ],
    "resurrected": [
        put("resurrected"), seen(1, "delivered", "resurrected", 2), seen(2, "acked", "resurrected", 2),
        seen(3, "ran_out", "resurrected", 2, due=at(2)), seen(3, "delivered", "resurrected", 3),
    ],
    "reclaimed": [
        put("reclaimed"), seen(1, "delivered", "reclaimed", 2), seen(2, "ran_out", "reclaimed", 2, due=at(30)),
        seen(2, "delivered", "reclaimed", 3), seen(3, "acked", "reclaimed", 3),
    ],
    "lost": [put("lost"), seen(1, "delivered", "lost", 2)],
}  # fmt: skip
INNOCENT = [
    put("acked"), seen(1, "delivered", "acked", 2), seen(2, "acked", "acked", 2),
    put("waiting"),
    put("swept", expires=at(60)),
    # Its lease had run out when it was moved: nobody took note of that.
    put("moved"), seen(1, "delivered", "moved", 2), event(40, "moved", "moved", version=3),
    seen(50, "delivered", "moved", 4), seen(51, "acked", "moved", 4),
    put("revived"), seen(1, "delivered", "revived", 2), seen(2, "buried", "revived", 2),
    event(40, "revived", "revived", version=3), seen(50, "delivered", "revived", 4), seen(51, "acked", "revived", 4),
    put("by tag", tag="spring"), seen(1, "delivered", "by tag", 2), seen(50, "delivered", "by tag", 4),
    seen(51, "acked", "by tag", 4),
    event(40, "tag_moved", tag="spring", count=1),
    put("tagged", tag="autumn"), put("tagged and done", tag="autumn"), seen(1, "delivered", "tagged and done", 2),
    seen(2, "acked", "tagged and done", 2),
    event(3, "tag_cancelled", tag="autumn", count=1),
    put("relet"), seen(1, "delivered", "relet", 2), seen(2, "relet", "relet", 2), seen(3, "delivered", "relet", 3),
    seen(4, "acked", "relet", 3),
    # Another broker's clock is behind.
    put("cancelled", 10), event(9.6, "cancelled", "cancelled", version=1) | {"broker": "c", "session": "two"},
    put("new", 1_850),
    # The one that took its place was delivered.
    put("replaced"), seen(5, "replaced", "replaced", 1), put("replaced", 5) | {"birth": 8},
    seen(6, "delivered", "replaced", 2) | {"birth": 8}, seen(7, "acked", "replaced", 2) | {"birth": 8},
]  # fmt: skip


@pytest.mark.prove
def test_each_promise_that_was_broken_is_named_and_nothing_else(spark: Any, tmp_path: Path) -> None:
    # What a store did not answer may have ended it.
    asked = [put("asked"), seen(1, "delivered", "asked", 2), seen(2, "unknown", "asked", 2)]
    rows = [one for story in GUILTY.values() for one in story] + INNOCENT + asked
    write_events(tmp_path, TOPIC, rows)
    write_events(tmp_path, "other", [put("elsewhere")])
    write_events(tmp_path, "again", [put("a"), event(5, "topic_dropped"), put("anew", 6)])
    write_events(tmp_path, "", own())
    found = audit(spark, f"file://{tmp_path}", (), lay(spark, ["waiting"]))
    assert found.broken == dict.fromkeys(sorted(GUILTY), 1)
    assert {row["promise"]: row["id"] for row in found.examples} == {name: name for name in GUILTY}
    assert (found.gaps, found.unended, found.unknown, found.exit_code) == ([], [], 1, 1)
    assert found.messages["cancelled"] == 2, "what had been acknowledged was not cancelled with its tag"
    assert "1 messages are not on the timeline" in audit_page(found, "x")


def audited(spark: Any, folder: Path, itself: list[dict[str, Any]], **pending: Any) -> Audit:
    """An audit of two messages: one that came twice, and one that is nowhere."""
    write_events(folder, TOPIC, [*GUILTY["unexplained"], *GUILTY["lost"]])
    write_events(folder, "", itself)
    return audit(spark, f"file://{folder}", [TOPIC], lay(spark, [], **pending))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("itself", "since", "until", "events"),
    [
        (own(event(20, "dropped", due=at(1.5), count=12)), 1.5, 20, 12),
        # Killed: the process that wrote its files said so.
        ([event(-5, "started", until=at(55)), event(30, "dropped", due=at(2))], 2, 30, 0),
        # The machine died: its next run shows that.
        ([event(-5, "started", until=at(-4)), event(400, "started") | {"session": "two"},
          event(500, "stopped") | {"session": "two"}], -3, 400, 0),
        # It has been silent for longer than a broker is that runs.
        ([event(-5, "started", until=at(-4))], -3, 3 + 1 + 5 + IDLE_MS / 1000, 0),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_called_broken(
    spark: Any, tmp_path: Path, itself: list[dict[str, Any]], since: float, until: float, events: int
) -> None:
    found = audited(spark, tmp_path, itself)
    assert (found.broken, found.unknown, found.exit_code) == ({}, 1, 3)
    (gap,) = found.gaps
    assert (gap.broker, gap.events) == ("b", events)
    assert (gap.since_ms, gap.until_ms) == (ms(at(since)), ms(at(until)))
    told = "12 events of broker b are missing" if events else "an unknown number of events of broker b are missing"
    assert told in audit_page(found, "x")


@pytest.mark.prove
def test_nothing_is_called_kept_of_a_topic_that_the_journal_does_not_know(spark: Any, tmp_path: Path) -> None:
    write_events(tmp_path, TOPIC, [put("there")])
    write_events(tmp_path, "", own())
    found = audit(spark, f"file://{tmp_path}", ["orders"], lay(spark, []), ["r7"])
    assert (found.broken, found.silent, found.unheard, found.exit_code) == ({}, ["orders"], ["r7"], 3)
    assert found.verdict == "no promise was looked at: no event was found"
    topic, id = not_known(found)
    assert "no event of the topic 'orders'. It ends at 2026-01-01 13:00:00 UTC" in topic and "each minute" in topic
    assert "no event of the id 'r7'" in id
    page = audit_page(found, "x")
    assert "Kept for every message" not in page and "no event of the topic" in page and "no event of the id" in page
    # Beside a topic that it knows, and an id.
    found = audit(spark, f"file://{tmp_path}", [TOPIC, "orders"], None, ["there"])
    assert (found.silent, found.unheard, found.exit_code, found.verdict) == (
        ["orders"], [], 3, "every promise was kept",
    )  # fmt: skip
    assert audit(spark, f"file://{tmp_path}", [TOPIC], None, ["r7"]).exit_code == 0


@pytest.mark.prove
def test_what_a_broker_that_runs_has_not_written_yet_is_not_known(spark: Any, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    later = (now - NOON).total_seconds()
    running = [event(-5, "started", until=at(55)), event(later - 30, "idle")]
    found = audited(spark, tmp_path, running, since=later)
    assert (found.broken, found.unknown, found.exit_code, found.unended) == ({"unexplained": 1}, 1, 1, ["b"])
    # As of a backup that was taken before, all is written.
    known = audit(spark, f"file://{tmp_path}", [TOPIC], lay(spark, []))
    assert (known.broken, known.unknown) == ({"lost": 1, "unexplained": 1}, 0)
