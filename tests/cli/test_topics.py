"""`timeline topic …` against a real broker, and the conformance suite's command."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

import timeline
from tests.cli.conftest import TIMELINE, Call, plain_environment
from tests.storage_plugins.faulty_stores import MovesByReadingFirst
from timeline.cli.messages import dead
from timeline.errors import Unavailable
from timeline.storage_plugins import memory

pytestmark = pytest.mark.processes


def test_create_is_idempotent_and_conflicts_are_refused(tell: Call) -> None:
    made = tell("topic", "create", "a", "--lease", "1m", "--max-payload-bytes", "2MiB", "--json").json[0]
    assert isinstance(made["uid"], str) and made["uid"].isdecimal()  # JavaScript would round it
    assert (made["name"], made["lease_ms"], made["max_payload_bytes"], made["revision"]) == (
        "a",
        60_000,
        2 * 1024**2,
        1,
    )
    assert tell("topic", "create", "a", "--lease", "1m", "--max-payload-bytes", "2MiB", "--json").json[0] == made
    conflict = tell("topic", "create", "a", "--lease", "2m")
    assert conflict.code == 4 and "EXISTS" in conflict.err and "lease" in conflict.err


def test_messages_are_counted_by_state(tell: Call, topic: str, address: str) -> None:
    """By brokers every few seconds, and now with --count; both drivers count the same."""
    with timeline.connect_sync(address) as tl, tl.producer(topic) as p:
        p.produce(b"", in_=0, id="dead")
        with tl.consumer(topic, id="c", credit=1) as c:
            next(iter(c)).bury("no reason")
            p.produce(b"", in_=0, id="leased")
            next(iter(c))
            for id, in_ in (("due", "0s"), ("later", "1h"), ("last", "100d")):
                p.produce(b"", in_=in_, id=id)
            counted = timeline.Counts(waiting=2, available=1, leased=1, dead=1, exact=True)
            assert tl.count(topic) == counted == asyncio.run(count(address, topic))
            expected = {"waiting": 2, "available": 1, "leased": 1, "dead": 1, "exact": True, "counted": None}
            assert tell("topic", "show", topic, "--count", "--json").json[0]["messages"] == expected
            listed = {each["name"]: each["messages"] for each in tell("topic", "list", "--count", "--json").json}
            assert listed[topic] == expected
            assert "dead                1\n" in tell("topic", "show", topic, "--count").out
            told = {"counted": None}
            while told["counted"] is None or told["waiting"] != 2:
                told = tell("topic", "show", topic, "--json").json[0]["messages"]
            assert told | {"counted": ""} == expected | {"dead": None, "exact": False, "counted": ""}
            assert "dead                not counted: --count does\n" in tell("topic", "show", topic).out
            line = next(line for line in tell("topic", "list").out.splitlines() if line.startswith(topic))
            assert line.split()[1:5] == ["delivers", "2", "1", "1"]


async def count(address: str, topic: str) -> timeline.Counts:
    async with timeline.connect(address) as tl:
        return await tl.count(topic)


def test_settings_change_while_the_topic_lives(tell: Call, topic: str) -> None:
    options = {
        "--lease": "45s", "--max-lease": "1h", "--max-payload-bytes": "10", "--horizon": "30d", "--max-deliveries": "0",
        "--redelivery-backoff": "2s", "--dead-retention": "7d", "--remember": "1h", "--lease-ahead": "5ms",
        "--max-rate-per-s": "500", "--retry-first": "250ms", "--retry-factor": "1.5", "--retry-cap": "1m",
        "--retry-jitter": "0", "--push-timeout": "5s", "--push-concurrency": "8", "--push-rate": "20",
    }  # fmt: skip
    done = tell("topic", "update", topic, *(word for pair in options.items() for word in pair), "--json")
    assert done.code == 0, done
    told = done.json[0]
    assert told["revision"] == 2
    assert [told[name] for name in (
        "lease_ms", "max_lease_ms", "max_payload_bytes", "horizon_ms", "max_deliveries", "redelivery_backoff_ms",
        "dead_retention_ms", "remember_ms", "lease_ahead_ms", "max_rate_per_s",
        "retry_first_ms", "retry_factor_percent", "retry_cap_ms", "retry_jitter_percent", "push_timeout_ms",
        "push_concurrency", "push_rate",
    )] == [
        45_000, 3_600_000, 10, 30 * 86_400_000, 0, 2_000, 7 * 86_400_000, 3_600_000, 5, 500, 250, 150, 60_000, 0,
        5_000, 8, 20,
    ]  # fmt: skip
    assert tell("topic", "update", topic, "--lease-ahead", "auto", "--json").json[0]["lease_ahead_ms"] == -1
    text = tell("topic", "show", topic).out
    for line in (
        "lease               45s",
        "max_deliveries      no limit",
        "lease_ahead         auto (",
        "buckets             64",
        "max_payload_bytes   10B",
        "max_rate_per_s      500/s",
        "redelivery_backoff  2s",
        "paused              no",
        "retry_factor        1.5",
        "push_url            nowhere",
        "push_rate           20/s",
    ):
        assert line in text


def test_the_secret_of_webhooks_is_shown_once(tell: Call, topic: str) -> None:
    url = "https://example.com/hook"
    secret = re.compile(r"whsec_[A-Za-z0-9+/]{43}=")
    made = tell("topic", "create", f"{topic}-pushed", "--push-url", url)
    assert made.code == 0 and len(secret.findall(made.out)) == 1
    again = tell("topic", "create", f"{topic}-pushed", "--push-url", url)
    assert f"'timeline topic secret {topic}-pushed --rotate' makes a new one" in again.out
    assert not secret.search(again.out)
    shown = tell("topic", "secret", f"{topic}-pushed")
    assert shown.code == 2 and "--rotate makes a new one" in shown.err and not secret.search(shown.out)
    first = tell("topic", "update", topic, "--push-url", url, "--json").json[-1]["secret"]
    second = tell("topic", "secret", topic, "--rotate", "--json").json[0]["secret"]
    assert secret.fullmatch(first) and secret.fullmatch(second) and first != second
    for asked in (
        ("show", topic),
        ("show", topic, "--json"),
        ("list", "--json"),
        ("update", topic, "--push-rate", "1"),
    ):
        told = tell("topic", *asked)
        assert told.code == 0 and "whsec" not in told.out + told.err


@pytest.mark.parametrize(
    "option", ["--push-url=ftp://example.com", "--retry-factor=much", "--retry-factor=0.5", "--retry-jitter=1.234"]
)
def test_settings_of_retries_and_webhooks_are_checked(tell: Call, topic: str, option: str) -> None:
    refused = tell("topic", "update", topic, option)
    assert refused.code in (2, 4) and option.partition("=")[0].strip("-").replace("-", "_") in refused.err.replace(
        "-", "_"
    )


def test_pause_stops_deliveries_and_resume_lets_them_go_on(tell: Call, topic: str) -> None:
    assert tell("topic", "pause", topic).out == f"paused {topic}\n"
    assert tell("produce", topic, "x", "--in", "0s", "--id", "a").code == 0
    assert tell("consume", topic, "--wait", "200ms").out == ""
    listed = {row["name"]: row["paused"] for row in tell("topic", "list", "--json").json}
    assert listed[topic] is True
    assert "paused" in tell("topic", "list").out
    assert tell("topic", "resume", topic).code == 0
    assert tell("consume", topic, "--count", 1, "--json").json[0]["id"] == "a"


def test_drop_removes_the_topic_with_its_messages(tell: Call, topic: str) -> None:
    tell("produce", topic, "x", "--in", "1h", "--id", "a")
    assert tell("topic", "drop", topic, "--yes", "--json").json == [{"name": topic, "dropped": True}]
    assert tell("topic", "show", topic).code == 4
    assert tell("topic", "create", topic).code == 0
    assert "max_payload_bytes   1MiB" in tell("topic", "show", topic).out
    assert tell("ls", topic, "--json").json == []


def test_drop_asks_first(tell: Call, topic: str, address: str) -> None:
    for answer, code, said in ((b"n\n", 4, b"nothing was done"), (b"", 2, b"--yes does it without asking")):
        done = subprocess.run(
            [*TIMELINE, "topic", "drop", topic, "--address", address], input=answer, capture_output=True,
            env=plain_environment(),
        )  # fmt: skip
        assert done.returncode == code and b"Remove topic" in done.stderr and said in done.stderr
    assert tell("topic", "show", topic).code == 0


@pytest.mark.parametrize(
    "command", ["show nowhere", "update nowhere --lease 1s", "pause nowhere", "drop nowhere --yes"]
)
def test_a_topic_that_is_not_there(tell: Call, command: str) -> None:
    done = tell("topic", *command.split())
    assert (done.code, done.out) == (4, "") and "NOT_FOUND" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--buckets", 0), "buckets must be a whole number from 1 to 4096"),
        (("--buckets", 4097), "buckets must be a whole number from 1 to 4096"),
        (("--lease", "0s"), "lease must be 1ms to "),
        (("--lease", "13h"), "above max_lease"),
        (("--max-payload-bytes", "65MiB"), "max_payload_bytes must be"),
        (("--lease-ahead", "2m"), "lease_ahead must be"),
    ],
)
def test_settings_out_of_range(tell: Call, options: tuple[object, ...], said: str) -> None:
    done = tell("topic", "create", "never", *options)
    assert (done.code, done.out) == (2, ""), done
    assert said in done.err
    assert tell("topic", "show", "never").code == 4


@pytest.mark.parametrize("name", ["", "a\tb", "x" * 256])
def test_names_that_are_none(tell: Call, name: str) -> None:
    done = tell("topic", "create", name)
    assert done.code == 2 and "1 to 255 printable characters" in done.err


async def test_long_work_on_letters_says_how_far_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead, "CHUNK", 2)
    asked: list[list[str]] = []

    async def call(ids: list[str]) -> list[str]:
        asked.append(ids)
        if len(asked) == 3:
            raise Unavailable("gone")
        return ids

    assert await dead._in_chunks(call, ["a", "b", "c"], "purged") == ["a", "b", "c"]  # type: ignore[arg-type,comparison-overlap]
    assert asked == [["a", "b"], ["c"]] and capsys.readouterr().err == ""
    asked[:] = [[]]
    with pytest.raises(Unavailable):
        await dead._in_chunks(call, ["a", "b", "c"], "purged")  # type: ignore[arg-type]
    assert capsys.readouterr().err == "timeline: broke off after 2 of 3\n"


def test_check_store(call: Call, tmp_path: Path) -> None:
    checks = ("--only", "lease_is_never_early", "--only", "fencing")
    done = call("check-store", f"sqlite:///{tmp_path / 'check.db'}?cache_mib=8", *checks, "--json")
    assert done.code == 0
    assert [line.get("outcome") for line in done.json] == ["passed", "passed", None]
    assert (done.json[-1]["ok"], done.json[-1]["passed"]) == (True, 2)
    assert done.json[-1]["url"].endswith("/check.db")  # what may hold a secret is left out
    assert done.json[-1]["declares"]["durable"] is True and done.json[-1]["warnings"] == []
    text = call("check-store", f"sqlite:///{tmp_path / 'check.db'}?payloads=memory://check", *checks).out
    assert "durable            no" in text and "! payloads in memory://check are gone" in text
    assert "✓ fencing" in text and "keeps the storage contract: 2 passed" in text


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_check_store_fails_where_one_check_does(call: Call, monkeypatch: pytest.MonkeyPatch, flags: tuple[str]) -> None:
    monkeypatch.setattr(memory, "MemoryStore", MovesByReadingFirst)
    done = call("check-store", "memory://", "--only", "fencing", "--only", "racing_moves", *flags)
    assert done.code == 1
    if flags:
        assert [line.get("outcome") for line in done.json] == ["passed", "failed", None]
        assert (done.json[-1]["ok"], done.json[-1]["failed"]) == (False, 1)
        assert "number of moves" in done.json[1]["found"]
    else:
        assert "✕ racing_moves" in done.out and "does NOT keep the storage contract: 1 passed, 1 failed" in done.out
