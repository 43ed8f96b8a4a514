"""Commands that say what is wrong and what to do: why and doctor."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import timeline
from tests.cli.conftest import Call, start
from tests.driver.broker import Broker
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.broker.limits import Limits
from timeline.cli.look.doctor import Finding, Severity, of_broker, of_store, of_topics
from timeline.config import HTTP, ServeConfig, split_address
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, Standings, TopicLoad
from timeline.driver.late import ADVICE, HAPPENED, KEEPS, Cause
from timeline.driver.queries import PingAnswer
from timeline.errors import Unavailable
from timeline.model import TopicSettings
from timeline.storage_plugins import open_store
from timeline.wire import Health

NOBODY = "127.0.0.1:1"


@pytest.mark.processes
def test_why_tells_what_kept_it_then_how_late_it_was(tell: Call, topic: str) -> None:
    assert tell("topic", "pause", topic).code == 0
    assert tell("produce", topic, "x", "--at", "2026-01-01T00:00Z", "--id", "a").code == 0
    (told,) = tell("why", topic, "a", "--json").json
    assert told["late"] == [] and told["message"]["state"] == "available"
    assert told["kept"]["why"] == KEEPS[Cause[told["kept"]["cause"]]] and told["kept"]["late_ms"] > 50
    text = tell("why", topic, "a").out
    assert "now  due for" in text and "no consumer has it" in text and f"timeline topic resume {topic}" in text
    assert tell("topic", "resume", topic).code == 0
    assert tell("consume", topic, "--count", 1, "--id", "worker-1").code == 0
    (told,) = tell("why", topic, "a", "--json").json
    assert (told["message"], told["kept"]) == (None, None)
    assert [(one["consumer"], one["cause"]) for one in told["late"]] == [("worker-1", "PRODUCED_LATE")]
    text = tell("why", topic, "a").out
    assert "delivered to worker-1, " in text and f" late: {HAPPENED[Cause.PRODUCED_LATE]}" in text
    assert f"  → {ADVICE[Cause.PRODUCED_LATE]}" in text
    assert f"now  no longer on {topic}: " in text


@pytest.mark.processes
def test_why_of_what_is_not_late(tell: Call, topic: str) -> None:
    tell("produce", topic, "x", "--in", "2h", "--id", "a")
    waiting = tell("why", topic, "a").out
    assert "now  waiting: due in " in waiting and waiting.endswith("\nno late delivery of this message is recorded\n")
    nothing = tell("why", topic, "b")
    assert (nothing.code, nothing.out) == (4, "") and "no message 'b' is on" in nothing.err
    tell("topic", "update", topic, "--max-deliveries", 1)
    tell("produce", topic, "x", "--in", "0s", "--id", "c")
    tell("consume", topic, "--count", 1, "--release", "0s")
    tell("consume", topic, "--wait", "300ms")
    assert "a dead letter since" in tell("why", topic, "c").out and "dead revive" in tell("why", topic, "c").out


@pytest.mark.processes
def test_doctor_of_a_broker(tell: Call, topic: str) -> None:
    done = tell("doctor", "--json")
    assert done.code == 0, done
    told = {row["about"]: row for row in done.json}
    assert told.keys() >= {"timeline", "configuration", "broker", "clock", "store", "topics"}
    assert told["broker"]["verdict"] == "good" and "sqlite:///timeline.db" in told["store"]["found"]
    assert "✓ broker" in tell("doctor").out


@pytest.mark.servers
@pytest.mark.processes
def test_doctor_cluster_and_top_of_a_store_whose_settings_lose_messages(call: Call, tmp_path: Path) -> None:
    require_service("redis")
    redis = RedisServer(tmp_path / "redis", "--appendfsync", "no").start()
    serving = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--store", redis.url)
    try:
        assert serving.stdout is not None
        at = ("--address", json.loads(serving.stdout.readline())["listen"])
        said = call("doctor", *at)
        assert said.code == 0 and "✓ store" not in said.out and "appendfsync always loses nothing" in said.out
        weak = [row for row in call("doctor", *at, "--json").json if row["about"] == "store"]
        assert [row["verdict"] for row in weak] == ["warning"] and "appendfsync no" in weak[0]["found"]
        for command in ("cluster", "top"):
            ((warning,),) = [one["store_warnings"] for one in call(command, *at, "--json").json[0]["brokers"]]
            assert "appendfsync no" in warning
            assert f": {warning}" in " ".join(call(command, *at).out.split())
    finally:
        serving.terminate()
        serving.communicate(timeout=30)
        redis.stop()


@pytest.mark.slow
def test_doctor_where_nobody_serves(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIMELINE_METRICS", "off")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("TIMELINE_LISTEN", taken)
        asked = call("doctor", "--address", NOBODY, "--timeout", "300ms", "--json")
        assert asked.code == 1 and "port" in {row["about"] for row in asked.json}
        silent = call("doctor", "--address", taken, "--timeout", "300ms", "--json")
        assert {row["about"] for row in silent.json} == {"address", "timeline", "configuration", "broker"}
        monkeypatch.setenv("TIMELINE_ADDRESS", NOBODY)
        done = call("doctor", "--timeout", "300ms", "--json")
    assert done.code == 1
    told = {row["about"]: row for row in done.json}
    assert "no broker at 127.0.0.1:1 (nothing listens there)" in told["broker"]["found"]
    assert "timeline serve" in told["broker"]["advice"]
    assert told["address"]["found"] == "looking for a broker at 127.0.0.1:1, as TIMELINE_ADDRESS says"
    assert told["port"]["found"].startswith(f"{taken} for --listen cannot be had: ")
    assert told["port"]["verdict"] == "bad" and taken in told["port"]["found"] and "--listen" in told["port"]["advice"]
    assert told["store"] == {
        "about": "store", "verdict": "good", "found": "sqlite:///timeline.db is not there yet; serve will make it",
        "advice": None,
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []  # it has only looked
    text = call("doctor", "--address", NOBODY, "--timeout", "300ms").out
    assert "✗ broker" in text and "    → Start one with 'timeline serve'" in text


@pytest.mark.processes
def test_doctor_names_the_broker_that_has_the_port(
    call: Call, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("METRICS", "off"), ("STORE", "memory://"), ("LISTEN", address)):
        monkeypatch.setenv(f"TIMELINE_{name}", value)
    with timeline.connect_sync(address) as tl:
        broker = tl.ping().broker
    told = {row["about"]: row for row in call("doctor", "--address", NOBODY, "--timeout", "300ms", "--json").json}
    assert told["broker"]["verdict"] == "bad" and told["port"]["verdict"] == "warning"
    held = f"{address} for --listen: the Timeline broker {broker} (timeline {timeline.__version__}) already serves here"
    assert told["port"]["found"] == held
    (tmp_path / "serve.toml").write_text("")
    asked = call("doctor", "--address", address, "--config", tmp_path / "serve.toml", "--json")
    (port,) = [row for row in asked.json if row["about"] == "port"]
    assert (asked.code, port["verdict"], port["found"]) == (0, "good", held)


@pytest.mark.processes
def test_doctor_tries_ports_beside_a_broker_that_answers(
    call: Call, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ports(**given: str) -> tuple[int, list[tuple[str, str]]]:
        for name in ("listen", "metrics", "http"):
            monkeypatch.setenv(
                f"TIMELINE_{name.upper()}", given.get(name, "127.0.0.1:0" if name == "listen" else "off")
            )
        done = call("doctor", "--address", address, "--json")
        return done.code, [(row["verdict"], row["found"]) for row in done.json if row["about"] == "port"]

    assert ports() == (0, [("good", "127.0.0.1:0 for --listen is free")])
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for option in ("listen", "metrics", "http"):
            code, found = ports(**{option: taken})
            assert (code, found[-1][0]) == (1, "bad"), found
            assert found[-1][1].startswith(f"{taken} for --{option} cannot be had: ")
    default = ServeConfig().metrics
    with ExitStack() as held:
        with suppress(OSError):  # another program has it: as well
            held.enter_context(socket.create_server(split_address(default)))
        code, found = ports(metrics=default)
    assert (code, found[-1][0]) == (0, "warning") and found[-1][1].startswith(f"{default} for --metrics cannot be had")


@pytest.mark.processes
def test_doctor_tries_the_default_port_of_http_beside_the_default_port(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port() -> list[tuple[str, str]]:
        rows = call("doctor", "--address", NOBODY, "--timeout", "50ms", "--json").json
        found = [row for row in rows if row["about"] == "port" and f"{HTTP} for --http cannot be had: " in row["found"]]
        return [(row["verdict"], row["advice"]) for row in found]

    monkeypatch.setenv("TIMELINE_METRICS", "off")
    monkeypatch.setenv("TIMELINE_STORE", "memory://")
    advice = "choose another: --http HOST:PORT"
    with ExitStack() as held:
        with suppress(OSError):  # another program has it: as well
            held.enter_context(socket.create_server(split_address(HTTP)))
        assert port() == [("warning", advice)]  # serve starts without HTTP
        monkeypatch.setenv("TIMELINE_HTTP", HTTP)
        assert port() == [("bad", advice)]
        monkeypatch.setenv("TIMELINE_HTTP", "off")
        assert port() == []
        monkeypatch.delenv("TIMELINE_HTTP")
        monkeypatch.setenv("TIMELINE_LISTEN", "127.0.0.1:0")
        assert port() == []  # no gateway is beside another port


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.processes
def test_doctor_names_all_ports_of_a_broker_that_answers(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--store", "memory://", "--json")
    running = [start("serve", *flags, cwd=tmp_path)]
    try:
        served = json.loads(line_of(running[0]))
        flags = ("--listen", "127.0.0.1:0", "--broker", served["listen"], "--json")
        running.append(start("gateway", *flags, cwd=tmp_path))
        http = json.loads(line_of(running[1]))["listen"]
        for name, value in (("LISTEN", served["listen"]), ("METRICS", served["metrics"]), ("HTTP", http)):
            monkeypatch.setenv(f"TIMELINE_{name}", value)
        rows = call("doctor", "--address", served["listen"], "--json")
        found = [(row["verdict"], row["found"]) for row in rows.json if row["about"] == "port"]
        assert rows.code == 0 and [verdict for verdict, _ in found] == ["good"] * 3, found
        assert "the Timeline broker" in found[0][1]
        assert [said for _, said in found[1:]] == [
            f"{served['metrics']} for --metrics: a Timeline broker already serves this here",
            f"{http} for --http: a Timeline broker already serves this here",
        ]
        # Another broker cannot have the metrics of this one.
        monkeypatch.setenv("TIMELINE_LISTEN", "127.0.0.1:0")
        assert call("doctor", "--address", served["listen"]).code == 1
    finally:
        for one in reversed(running):
            one.terminate()
            one.communicate(timeout=30)


@pytest.mark.parametrize(
    ("listen", "metrics"),
    [("127.0.0.1:9000", "127.0.0.1:9000"), ("localhost:9000", "127.0.0.1:9000"), ("0.0.0.0:9000", "127.0.0.1:9000")],
)
def test_one_port_for_both_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch, listen: str, metrics: str) -> None:
    said = "listen and metrics are both port 9000: give metrics another one, or say metrics off"
    done = call("serve", "--listen", listen, "--metrics", metrics, "--insecure")
    assert done.code == 2 and said in done.err
    monkeypatch.setenv("TIMELINE_LISTEN", listen)
    monkeypatch.setenv("TIMELINE_METRICS", metrics)
    told = {row["about"]: row for row in call("doctor", "--address", NOBODY, "--timeout", "50ms", "--json").json}
    assert (told["configuration"]["verdict"], told["configuration"]["found"]) == ("bad", said)


@pytest.mark.parametrize(("other", "port"), [("listen", 9000), ("metrics", 9001)])
def test_a_port_of_its_own_for_http_is_refused(call: Call, other: str, port: int) -> None:
    done = call("serve", "--http", f"127.0.0.1:{port}")
    assert done.code == 2
    assert f"{other} and http are both port {port}: give http another one, or say http off" in done.err


def test_a_broker_that_nobody_reaches_where_it_says_warns(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMELINE_ADVERTISE", "broker-1:9000")
    said = "other machines are told to come to broker-1:9000, and cannot reach 127.0.0.1:9000."
    rows = call("doctor", "--address", NOBODY, "--timeout", "50ms", "--json").json
    assert [row["verdict"] for row in rows if said in row["found"]] == ["warning"]
    assert said in call("serve", "--store", "sqlite:////nowhere/timeline.db", "--metrics", "off").err
    monkeypatch.setenv("TIMELINE_ADVERTISE", "localhost:9000")
    assert said not in call("doctor", "--address", NOBODY, "--timeout", "50ms").out


def test_a_broker_without_a_token_among_others_that_ask_for_one_warns(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "other brokers refuse the calls of this one, because it has no token"

    def warned() -> list[str]:
        rows = call("doctor", "--address", NOBODY, "--timeout", "50ms", "--json").json
        return [row["verdict"] for row in rows if said in row["found"]]

    monkeypatch.setenv("TIMELINE_TOKENS", "tokens.json")
    assert warned() == []
    monkeypatch.setenv("TIMELINE_SYNC", "etcd://127.0.0.1:1/timeline")
    assert warned() == ["warning"]
    assert said in call("serve", "--store", "sqlite:////nowhere/timeline.db", "--metrics", "off").err
    monkeypatch.setenv("TIMELINE_TOKEN_FILE", "broker.token")
    assert said not in call("serve", "--store", "sqlite:////nowhere/timeline.db", "--metrics", "off").err


@pytest.mark.servers
@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_serves_once_the_store_is_open(tmp_path: Path, workers: str) -> None:
    require_service("redis")
    redis = RedisServer(tmp_path / "redis")
    flags = ("--listen", "127.0.0.1:0", "--metrics", "off", "--store", redis.url, "--workers", workers)
    serving = start("serve", *flags, "--log-level", "error")
    try:
        assert serving.stdout is not None
        first = serving.stdout.readline().decode()
        assert " listens on 127.0.0.1:" in first and "serves once redis://127.0.0.1:" in first
        redis.start()
        assert f" serves redis://127.0.0.1:{redis.port}/0 on 127.0.0.1:" in serving.stdout.readline().decode()
    finally:
        serving.terminate()
        serving.communicate(timeout=30)
        redis.stop()


def test_doctor_says_where_it_looked_and_who_said_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMELINE_ADDRESS", NOBODY)
    told = {row["about"]: row for row in call("doctor", "--timeout", "50ms", "--json").json}
    assert told["address"]["found"] == f"looking for a broker at {NOBODY}, as TIMELINE_ADDRESS says"


def test_doctor_of_a_bad_configuration(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMELINE_STROE", "memory://")
    done = call("doctor", "--address", NOBODY, "--timeout", "300ms", "--json")
    told = {row["about"]: row for row in done.json}
    assert done.code == 1 and "did you mean TIMELINE_STORE?" in told["configuration"]["found"]
    assert "store" not in told  # which one it would be is not known


async def test_stores_that_serve_would_refuse_or_take(tmp_path: Path) -> None:
    async def said(url: str) -> tuple[Severity, str]:
        (found,) = [found for found in await of_store(url) if found.about == "store"]
        return found.severity, found.found

    file = tmp_path / "t.db"
    file.write_bytes(b"no database at all" * 100)
    assert (await said(f"sqlite:///{file}"))[0] is Severity.BAD
    file.unlink()
    assert (await said(f"sqlite:///{file}")) == (
        Severity.GOOD,
        f"sqlite:///{file} is not there yet; serve will make it",
    )
    assert (await said(f"sqlite:///{tmp_path}/none/t.db"))[0] is Severity.BAD
    assert (await said("memory://"))[0] is Severity.WARNING
    verdict, found = await said("sqlit:///x")
    assert verdict is Severity.BAD and "did you mean sqlite://" in found


async def test_a_store_whose_url_spells_its_file_out_is_looked_at_where_serve_puts_it(tmp_path: Path) -> None:
    (tmp_path / "my folder").mkdir()
    url = f"sqlite:///{tmp_path}/my%20folder/t.db"
    (there,) = await of_store(url)
    assert there.severity is Severity.GOOD and "is not there yet" in there.found
    await (await open_store(url)).close()
    assert (tmp_path / "my folder" / "t.db").exists()
    assert "opened and checked" in (await of_store(url))[0].found


@pytest.mark.slow
def test_doctor_goes_on_when_a_broker_goes_away_meanwhile(
    tell: Call, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> None:
        raise Unavailable("it has gone")

    monkeypatch.setattr("timeline.cli.look.doctor._ping", gone)
    done = tell("doctor", "--json")
    told = {row["about"]: row for row in done.json}
    assert done.code == 1 and told["broker"]["verdict"] == "bad" and "topics" in told


WELL = BrokerStanding("b:9000", "b1", "0", 2_000, 1_000, "", "sqlite:///t.db", 1.5, (), {}, ())
NEAR = PingAnswer("b1", "0", "b:9000", 0.5, 0.1, 0.25)
LOAD = TopicLoad("t", 0, 5, 0, 1, 1, 0, 10, 0, 0)


def verdicts(found: list[Finding]) -> dict[str, Severity]:
    return {one.about: one.severity for one in found}


@pytest.mark.parametrize(
    ("change", "ping", "about", "verdict", "said"),
    [
        ({}, {}, "clock", Severity.GOOD, "ahead of"),
        ({}, {"offset_ms": -70.0}, "clock", Severity.WARNING, "70 ms behind"),
        ({}, {"offset_ms": 70.0, "error_ms": 40.0}, "clock", Severity.GOOD, "give or take 40 ms"),  # not sure
        ({}, {"offset_ms": 900.0}, "clock", Severity.BAD, "900 ms ahead"),
        ({"trouble": "the store is down: disk full"}, {}, "broker", Severity.BAD, "not ready: the store is down"),
        ({"version": "9.9"}, {}, "broker", Severity.WARNING, "timeline 9.9"),
        ({"store_ms": 80.0}, {}, "store", Severity.WARNING, "80 ms"),
        ({"store": "memory://"}, {}, "store", Severity.WARNING, "messages end with the broker"),
        ({"trouble": "the store is down"}, {}, "store", Severity.WARNING, "not asked"),
    ],
)
def test_findings_of_a_broker(
    change: dict[str, object], ping: dict[str, float], about: str, verdict: Severity, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("timeline.cli.look.doctor.__version__", "0")
    found = of_broker(dataclasses.replace(WELL, **change), dataclasses.replace(NEAR, **ping))  # type: ignore[arg-type]
    (one,) = [one for one in found if one.about == about]
    assert one.severity is verdict and said in one.found, one
    assert bool(one.advice) is (verdict is not Severity.GOOD and "not asked" not in said)


def test_a_store_that_a_broker_warns_of_is_told_once() -> None:
    down = dataclasses.replace(WELL, trouble="the store is another one", warnings=("it lost its data",))
    found = [one.found for one in of_broker(down, NEAR) if one.about == "store"]
    assert found == ["sqlite:///t.db: it lost its data"]


@pytest.mark.parametrize(
    ("load", "settings", "said"),
    [
        ({}, {}, []),
        ({"available": 3, "credit": 0}, {}, ["all consumers of t are full or ask for nothing, with 3 due"]),
        ({"available": 3, "consumers": 0, "credit": 0}, {}, ["nobody consumes t, with 3 due"]),
        ({"available": 3}, {"paused": True}, ["t is paused, 3 due"]),
    ],
)
def test_findings_of_a_topic(load: dict[str, int], settings: dict[str, bool], said: list[str]) -> None:
    standing = dataclasses.replace(WELL, topics=(dataclasses.replace(LOAD, **load),))
    found = of_topics(Standings((standing,), {}), {"t": TopicSettings(**settings)})  # type: ignore[arg-type]
    assert [one.found for one in found[1:]] == said
    assert all(one.severity is Severity.WARNING and one.advice for one in found[1:])


async def test_a_topic_whose_takes_have_ended_names_the_take() -> None:
    async with Broker(limits=Limits(count_every_ms=5)) as broker, timeline.connect(broker.address) as tl:
        settings = (await tl.create_topic("t")).settings
        await tl.producer("t").produce_many(timeline.Batch([b""] * 2, in_=0))
        assert len(await tl.take("t", max=1)) == 1
        while (standings := await tl.standing()).brokers[0].topics[0].available != 1:
            pass  # it is counted again and again
        (said,) = [one for one in of_topics(standings, {"t": settings}) if one.about == "consumers"]
        assert said.found == (
            "no take of t waits now, and it has no other consumer, with 1 due; a take that has ended still counts as a "
            "consumer for about a minute"
        )
        assert said.severity is Severity.WARNING and said.advice.startswith("call take again sooner")
        async with tl.consumer("t", id="full", credit=1) as c:
            (held,) = await c.take(max=1)
            await tl.producer("t").produce(b"", in_=0)
            while not (standings := await tl.standing()).brokers[0].topics[0].available:
                pass
            (said,) = [one for one in of_topics(standings, {"t": settings}) if one.about == "consumers"]
            assert said.found == "all consumers of t are full or ask for nothing, with 1 due"
            await held.release()


@pytest.mark.parametrize("health", list(Health))
def test_findings_of_a_consumer(health: Health) -> None:
    standing = dataclasses.replace(WELL, topics=(LOAD,), consumers=(ConsumerStatus("t", "worker-1", health, 1, 1, 0),))
    found = of_topics(Standings((standing,), {}), {"t": TopicSettings()})
    assert verdicts(found).get("consumers") is (None if health is Health.HEALTHY else Severity.WARNING)
    assert all("worker-1 of t" in one.found for one in found if one.about == "consumers")
