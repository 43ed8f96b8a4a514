"""Commands that look ahead, back, and on: forecast, late, ls --follow, completion; against a real broker."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import timeline
from tests.cli.conftest import Call, plain_environment, start
from tests.driver.broker import Broker
from timeline.cli.app import UNREACHABLE, Failed
from timeline.cli.look.forecast import load_ahead
from timeline.cli.messages.read import LIMIT, changes, follow_changes
from timeline.columns import Int64
from timeline.driver.late import ADVICE, HAPPENED, LEARNT, Cause
from timeline.model import State

pytestmark = pytest.mark.processes


def test_forecast_counts_what_comes(tell: Call, topic: str) -> None:
    for due in ("30s", "90s", "95s"):
        assert tell("produce", topic, "x", "--in", due).code == 0
    tell("produce", topic, "x", "--in", "0s")
    (told,) = tell("forecast", topic, "--window", "2m", "--step", "1m", "--json").json
    assert (told["topic"], told["step_ms"], told["exact"], told["overdue"]) == (topic, 60_000, True, 1)
    assert [step["count"] for step in told["steps"]] == [1, 2] and told["total"] == 3
    assert told["steps"][0]["end_ms"] == told["steps"][1]["start_ms"] == told["steps"][0]["start_ms"] + 60_000
    text = tell("forecast", topic, "--window", "2m", "--step", "1m").out
    assert f"{topic}: 3 to come until" in text and "1 due already" in text
    assert "peak          2 in the 1m from 2" in text and "█" in text


def test_forecast_of_all_topics_adds_them_up(tell: Call, topic: str) -> None:
    before = tell("forecast", "--json").json[0]["total"]
    assert tell("topic", "create", topic + "-2").code == 0
    for name in (topic, topic + "-2"):
        tell("produce", name, "x", "--in", "10m")
    (told,) = tell("forecast", "--json").json
    assert (told["topic"], told["total"]) == (None, before + 2)


async def test_forecast_of_all_topics_keeps_to_its_timeout() -> None:
    async with Broker() as broker, timeline.connect(broker.address, timeout="60s") as tl:
        for name in ("a", "b", "c"):
            await tl.create_topic(name)
            async with tl.producer(name) as p:
                await p.produce(b"", in_="1h")
        assert broker.store is not None
        count_due, slow = broker.store.count_due, asyncio.Event()

        async def late(topic: timeline.Topic, edges_ms: Int64, held: bool = False) -> Int64:
            if topic.name != "a":
                await slow.wait()
            return await count_due(topic, edges_ms, held)

        broker.store.count_due = late  # type: ignore[method-assign, assignment]
        said = "UNAVAILABLE: only 1 of 3 topics were counted within 1s. Name one topic, or wait longer with --timeout"
        with pytest.raises(Failed, match=said) as failed:
            await load_ahead(tl, None, 7_200_000, 60_000, "1s")
        assert failed.value.code == UNREACHABLE
        slow.set()
        assert (await load_ahead(tl, None, 7_200_000, 60_000, "60s")).total == 3


def test_forecast_of_too_many_steps_is_refused(tell: Call, topic: str) -> None:
    done = tell("forecast", topic, "--window", "10d", "--step", "1s")
    assert done.code == 2 and "make the step longer" in done.err


def test_late_says_what_was_late_and_why(tell: Call, topic: str) -> None:
    nothing = f"nothing on {topic} was more than 50 ms late in the last 1h, or since the brokers started\n"
    assert tell("late", topic).out == nothing
    # Put when it was due long ago: late from the beginning, whatever this machine is doing.
    assert tell("produce", topic, "x", "--at", "2025-12-31T00:00Z", "--id", "a").code == 0
    assert tell("produce", topic, "x", "--at", "2026-01-01T00:00Z", "--id", "b").code == 0
    assert tell("consume", topic, "--count", 2, "--id", "worker-1").code == 0
    told = {row["id"]: row for row in tell("late", topic, "--json").json}
    assert told.keys() == {"a", "b"}
    assert {row["cause"] for row in told.values()} == {"PRODUCED_LATE"}
    assert all(row["late_ms"] == row["delivered_ms"] - row["due_ms"] > 50 for row in told.values())
    assert {row["consumer"] for row in told.values()} == {"worker-1"}
    text = tell("late", topic).out
    assert text.count(HAPPENED[Cause.PRODUCED_LATE]) == 3  # two lines, one sum
    assert f"2 × {HAPPENED[Cause.PRODUCED_LATE]} → {LEARNT[Cause.PRODUCED_LATE]}" in text
    assert len(tell("late", "--limit", 1, "--json").json) == 1
    newest = tell("late", topic, "--limit", 1)
    assert f"2 × {HAPPENED[Cause.PRODUCED_LATE]}" in newest.out
    assert newest.err == "timeline: these are the newest 1 of 2; --limit shows more\n"
    assert tell("late", topic, "--limit", 2).err == ""


def test_every_cause_is_put_in_words() -> None:
    assert HAPPENED.keys() == ADVICE.keys() == LEARNT.keys() == set(Cause)


def test_follow_tells_each_change(tell: Call, topic: str, address: str) -> None:
    tell("produce", topic, "x", "--in", "1h", "--id", "early")
    following = start("ls", topic, "--follow", "--every", "10ms", "--json", address=address)

    def next_change() -> tuple[str, str]:
        assert following.stdout is not None
        told = json.loads(following.stdout.readline())
        return told["id"], told["change"]

    try:
        assert next_change() == ("early", "there")
        tell("move", topic, "early", "--in", "2h")
        assert next_change() == ("early", "moved")
        tell("produce", topic, "x", "--in", "1h", "--id", "later")
        assert next_change() == ("later", "new")
        tell("cancel", topic, "later")
        assert next_change() == ("later", "gone")
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=30)
    finally:
        following.kill()
        following.wait()
    assert (following.returncode, errors) == (130, b"\ntimeline: interrupted\n")


STOOD = timeline.StoredMessage(
    "a", State.WAITING, 1_000, 1_000, 1, 0, "default", None, None, 1, 1, 0, 0, None, 7, 0, 0, 1
)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {}, None),
        ({}, {"due_ms": 2_000, "version": 2}, "moved"),
        ({}, {"due_ms": 2_000, "version": 3, "deliveries": 1}, "released"),
        ({}, {"due_ms": 1_000, "version": 3}, None),  # leased ahead, and returned unseen
        ({}, {"state": State.AVAILABLE}, "due"),
        ({}, {"state": State.LEASED, "holder": "w", "version": 2, "deliveries": 1}, "leased"),
        ({}, {"birth": 8}, "new"),
        ({"state": State.LEASED, "holder": "w"}, {"state": State.AVAILABLE, "holder": "w"}, "lease ran out"),
        ({"state": State.LEASED}, {"state": State.LEASED, "due_ms": 5_000}, "extended"),
        ({"state": State.LEASED}, {"state": State.LEASED, "version": 2, "deliveries": 1}, "leased again"),
        ({"state": State.LEASED}, {"state": State.WAITING, "due_ms": 9_000}, "released"),
        (
            {"state": State.AVAILABLE},
            {"state": State.AVAILABLE, "deliveries": 1, "version": 2, "holder": "w"},
            "lease ran out",
        ),
        ({"state": State.AVAILABLE}, {"state": State.AVAILABLE, "due_ms": 2_000, "version": 3}, "returned unseen"),
        ({"state": State.DEAD}, {"state": State.WAITING}, "revived"),
    ],
)
def test_what_came_between_two_looks(before: dict[str, Any], after: dict[str, Any], told: str | None) -> None:
    then, now = dataclasses.replace(STOOD, **before), dataclasses.replace(STOOD, **after)
    found = changes({"a": then}, {"a": now}, first=False)
    assert [change for change, _ in found] == ([] if told is None else [told])


async def test_follow_waits_for_what_may_work_later_and_ends_by_what_may_not() -> None:
    looks: list[list[timeline.StoredMessage] | timeline.TimelineError] = [
        [], timeline.Throttled("too many scans"), timeline.Unavailable("away"), [STOOD], timeline.NotFound("no topic"),
    ]  # fmt: skip

    async def look() -> AsyncIterator[timeline.StoredMessage]:
        seen = looks.pop(0)
        if isinstance(seen, timeline.TimelineError):
            raise seen
        for entry in seen:
            yield entry

    told: list[str] = []
    with pytest.raises(timeline.NotFound):
        await follow_changes(look, 10, 0.0, lambda change, _: told.append(change))
    assert told == ["new"] and looks == []


def test_follow_refuses_more_than_it_reads(tell: Call, topic: str) -> None:
    for id in ("a", "b"):
        tell("produce", topic, id, "--in", "1h", "--id", id)
    done = tell("ls", topic, "--follow", "--limit", 1)
    assert done.code == 4 and "more than 1 messages match" in done.err and "--tag" in done.err


def completed(words: str, address: str) -> list[str]:
    """What bash is told when a person presses the tab key behind `words`."""
    said = words.split(" ")
    environment = plain_environment() | {
        "_TIMELINE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(said) - 1),
        "TIMELINE_ADDRESS": address,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from timeline.cli.app import run; run([])"], env=environment, capture_output=True
    )
    assert done.stderr == b""
    return [line.partition(",")[2] for line in done.stdout.decode().split()]


def test_the_shell_completes_commands_options_and_topics(tell: Call, address: str) -> None:
    assert tell("topic", "create", "boarding").code == 0
    assert completed("timeline fore", address) == ["forecast"]
    assert completed("timeline dead re", address) == ["revive"]
    assert completed("timeline ls boarding --stat", address) == ["--state"]
    assert completed("timeline ls boa", address) == ["boarding"]
    assert completed("timeline topic pause boa", address) == ["boarding"]
    assert tell("schedule", "create", "boarding", "hourly", "--every", "1h").code == 0
    assert completed("timeline schedule pause boarding ho", address) == ["hourly"]
    assert completed("timeline schedule pause boarding x", address) == []
    assert completed("timeline ls boa", "127.0.0.1:1") == []
    assert completed("timeline pro --i", address) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(call: Call, shell: str) -> None:
    done = call("completion", shell)
    assert done.code == 0 and "_TIMELINE_COMPLETE" in done.out
    assert call("completion", "tcsh").code == 2


def test_follow_says_that_it_goes_on_and_takes_more_than_a_list_shows(tell: Call, topic: str, address: str) -> None:
    lines = "\n".join(f"m{n}" for n in range(LIMIT + 1)).encode()
    start("produce", topic, "--lines", "--in", "1h", address=address).communicate(lines, timeout=30)
    following = start("ls", topic, "--follow", address=address)
    try:
        assert following.stdout is not None
        assert all(following.stdout.readline().rstrip().endswith(b"there") for _ in range(LIMIT + 1))
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=30)
    finally:
        following.kill()
        following.wait()
    said = f"timeline: following {topic}, a look every 1s; Ctrl-C ends it\n"
    assert errors.decode() == f"{said}\ntimeline: interrupted\n"
