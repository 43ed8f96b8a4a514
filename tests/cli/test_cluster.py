"""`timeline cluster`: what it makes of brokers' answers, and that it asks them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from tests.cli.conftest import Call
from timeline.cli.look.cluster import DEALT_SAID, TOPICS_SHOWN, ClusterLook, picture, put_together
from timeline.cli.output import Screen
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings, TopicLoad
from timeline.driver.queries import PingAnswer
from timeline.wire import Health

NOW_MS = 1_774_767_600_000
BOUNDS = (1, 10, None)
WEAK = "appendfsync no: set it to always"


def standing(name: str, consumers: int, dealt: int, trouble: str = "") -> BrokerStanding:
    load = TopicLoad("departures", 3, 1_000, NOW_MS, NOW_MS, consumers, 7, 93, 500, 1, 64, dealt)
    connected = tuple(
        ConsumerStatus("departures", f"{name}-{at}", Health.HEALTHY, 93, 1 << 20, 7) for at in range(consumers)
    )
    late = {"departures": LatenessHistogram(BOUNDS, (98, 2, 0)), "others": LatenessHistogram(BOUNDS, (0, 0, 1))}
    return BrokerStanding(
        f"{name}:9000", name, "0.1.0", NOW_MS, NOW_MS - 60_000, trouble, "redis://", 1.5, (load,), late, connected,
        "joined, 3 brokers", (WEAK,) if name != "b3" else (),
    )  # fmt: skip


def ping(name: str, offset_ms: float) -> PingAnswer:
    return PingAnswer(name, "0.1.0", f"{name}:9000", 1.0, offset_ms, 0.5)


def look() -> ClusterLook:
    brokers = (standing("b2", 2, 43), standing("b1", 1, 21), standing("b3", 0, 64, "the store is down: gone"))
    pings = [ping("b2", 10.0), ping("b1", 900.0), None]
    return put_together(Standings(brokers, {"b4:9000": "nobody listens"}), pings)


def drawn(width: int = 160) -> str:
    screen = io.StringIO()
    Screen(screen, width).print(picture(look()))
    assert "\\" not in screen.getvalue()  # nothing of its own is escaped
    return screen.getvalue()


def test_a_line_a_broker_a_line_a_topic_and_who_is_connected_where() -> None:
    lines = [line.split() for line in drawn().splitlines()]
    text = drawn()
    (b1,) = [line for line in lines if line[:2] == ["b1", "b1:9000"]]
    assert " ".join(b1[3:]) == "60 s +445.0 ± 0.5 ms 1 7 93 ≤ 1 ms ≤ 10 ms > 1h joined, 3 brokers"
    assert [line[0] for line in lines if line and line[0] in ("b1", "b2", "b3")] == ["b1", "b2", "b3"]
    (topic,) = [" ".join(line) for line in lines if line[:1] == ["departures"]]
    assert f"{DEALT_SAID}\nTOPIC " in text
    assert topic == "departures 64 21 for 1 43 for 2 0 for 0"  # who has no consumer deals nothing
    assert text.count("! store of b1, b2: appendfsync no:") == 1
    assert "b3: the store is down: gone" in text and "b4:9000: nobody listens" in text
    assert ["b2-1", "departures", "b2", "healthy", "7", "93", "1.0"] in lines


@pytest.mark.slow
def test_of_many_topics_those_with_consumers_are_shown() -> None:
    idle = [TopicLoad(f"idle-{at}", 0, 0, 0, NOW_MS, 0, 0, 0, 0, 0, 64, 64) for at in range(5_000)]
    busy = TopicLoad("used", 0, 0, 0, NOW_MS, 2, 0, 0, 0, 0, 64, 64)
    stands = replace(standing("b1", 0, 0), topics=(*idle, busy))
    screen = io.StringIO()
    seen = put_together(Standings((stands,), {}), [None])
    Screen(screen, 160).print(picture(seen))
    lines = screen.getvalue().splitlines()
    assert sum(line.startswith("idle-") for line in lines) == TOPICS_SHOWN - 1
    assert next(line.split()[0] for line in lines if line.startswith(("idle-", "used"))) == "used"
    assert f"… and {5_001 - TOPICS_SHOWN:,} topics more" in lines
    assert len(seen.as_json()["assignment"]) == 5_001


def test_as_json() -> None:
    told = look().as_json()
    assert [one["broker"] for one in told["brokers"]] == ["b1", "b2", "b3"]
    assert [one["clock_ms"] for one in told["brokers"]] == [445.0, -445.0, None]
    assert told["brokers"][0]["lateness_ms"] == {"p50": 1, "p99": 10, "max": None}
    assert [one["store_warnings"] for one in told["brokers"]] == [[WEAK], [WEAK], []]
    assert told["brokers"][2]["trouble"] == "the store is down: gone"
    assert told["assignment"] == [
        {
            "topic": "departures",
            "buckets": 64,
            "brokers": {
                "b1": {"buckets": 21, "consumers": 1},
                "b2": {"buckets": 43, "consumers": 2},
                "b3": {"buckets": 0, "consumers": 0},
            },
        }
    ]
    assert {(one["id"], one["broker"]) for one in told["consumers"]} == {("b1-0", "b1"), ("b2-0", "b2"), ("b2-1", "b2")}
    assert told["unreachable"] == {"b4:9000": "nobody listens"}


@pytest.mark.slow
def test_a_broker_alone_is_a_cluster_of_one(tell: Call, topic: str) -> None:
    done = tell("cluster", "--json")
    (told,) = done.json
    (one,) = told["brokers"]
    assert done.code == 0 and one["sync"] == "joined, 1 broker" and one["clock_ms"] == 0.0
    assert topic in {each["topic"] for each in told["assignment"]}
    assert "timeline cluster" in tell("cluster").out


def test_nobody_there(call: Call) -> None:
    assert call("cluster", "--address", "127.0.0.1:1").code == 3
