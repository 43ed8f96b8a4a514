"""Texts that somebody else chose (ids, reasons, URLs) neither give a terminal orders nor end in a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import pytest

import timeline
from tests.cli.conftest import Call, start
from timeline.cli.app import cli, complain, say
from timeline.cli.output import print_json
from timeline.logs import JsonLines, TextLines
from timeline.model import Topic, TopicSettings
from timeline.outbox import add
from timeline.pipeline.jobs.audit import Audit, audit_page
from timeline.storage_plugins import open_store
from timeline.wording import printable

EVIL = "a\x1b]0;owned\x07\x9b2J\r\n[bold]b[/][link=x]\u202e\u2066\u200b\u2028 :skull:"
SPELT = printable(EVIL)
MARKUP = "[bold]b[/bold][link=file:///x]c[/link]:skull:"
"""A name that is printable, of which a terminal's library would make something else."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
OWN_DATA = {"demo", "completion", "help", "version", "pipeline measure", "pipeline year"}
"""Commands that show data of their own alone; so do those of `bench`."""
WITH_SPARK = {
    f"pipeline {name}" for name in ("audit", "backup", "compact", "forecast", "load", "load-schedules", "restore")
}


@dataclass
class Stage:
    """A broker of a name with markup, whose store has hostile messages on `topic` and a topic of an old rule's name."""

    address: str
    folder: Path
    topic: str = "departures"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("hostile")
    url = f"sqlite:///{folder}/timeline.db"

    asyncio.run(old_topic(url))
    asyncio.run(old_topic(f"sqlite:///{folder}/idle.db"))
    flags = ("--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--log-level", "debug", "--name", MARKUP)
    broker = start("serve", "--store", url, *flags, cwd=folder)
    try:
        assert broker.stdout is not None
        at = Stage(json.loads(broker.stdout.readline())["listen"], folder)
        with timeline.connect_sync(at.address) as tl:
            tl.create_topic(at.topic)
            hostile(tl, at.topic)
            yield at
    finally:
        broker.terminate()
        _, errors = broker.communicate(timeout=30)
    assert_printable(errors.decode())


async def old_topic(url: str) -> None:
    """Makes a topic of a name that is none any more."""
    store = await open_store(url)
    await store.open()
    await store.create_topic(Topic(EVIL, 4711, TopicSettings(paused=True), created_ms=1))
    await store.close()


def hostile(tl: timeline.SyncTimeline, topic: str) -> None:
    """A message in each state and a schedule, all of whose words are hostile, and a message that was late."""
    tl.schedule(topic, "nightly", cron="@daily", payload=EVIL, tag=EVIL, headers={EVIL: EVIL})
    with tl.producer(topic, group=EVIL) as p:
        for id in ("dead", "late", "leased"):
            p.produce(EVIL.encode(), at=timeline_past(), id=id + EVIL, tag=EVIL, headers={EVIL: EVIL})
        with tl.consumer(topic, id=EVIL, credit=3) as c:
            for _ in range(3):
                d = next(iter(c))
                d.bury(EVIL) if d.id.startswith("dead") else d.ack() if d.id.startswith("late") else None
        for id, in_ in (("", "1h"), ("moved", "1h"), ("cancelled", "1h"), ("due1", "0s"), ("due2", "0s")):
            p.produce(EVIL.encode(), in_=in_, id=id + EVIL, tag=EVIL, headers={EVIL: EVIL})


def timeline_past() -> int:
    """A due that makes what is put late: the first moment after that of which the driver thinks that it is seconds."""
    return 1_000_000_000_000


def outbox_of(at: Stage) -> str:
    """An outbox in which a message waits, and one was rejected, whose topics, ids, groups and reasons are hostile."""
    file = at.folder / "shop.db"
    if not file.exists():
        with sqlite3.connect(file) as shop:
            from timeline.outbox import ddl

            for made in ddl("sqlite"):
                shop.execute(made)
            for _ in range(2):
                add(shop, timeline.Message(b"x", at=timeline_past(), id=EVIL), topic=MARKUP, group=EVIL)
            shop.execute("UPDATE timeline_outbox SET refused_ms = 1, refused = ? WHERE seq = 1", (EVIL,))
        shop.close()
    return f"sqlite:///{file}"


def crontab_of(at: Stage) -> str:
    """A crontab whose lines are hostile, the one that can be taken and the one that cannot."""
    file = at.folder / "crontab"
    one_line = EVIL.replace("\r", "").replace("\n", "").replace("\u2028", "")
    file.write_text(f"@daily echo {MARKUP}\n@daily echo {one_line}\n")
    return str(file)


def tokens_of(at: Stage) -> str:
    return str(at.folder / "tokens.json")


FED: dict[str, Callable[[Stage], list[str]]] = {
    "serve": lambda at: ["--listen", EVIL],
    "gateway": lambda at: ["--listen", EVIL],
    "topic create": lambda at: [EVIL],
    "topic list": lambda at: [],
    "topic show": lambda at: [EVIL],
    "topic update": lambda at: [at.topic, "--lease", EVIL],
    "topic secret": lambda at: [EVIL, "--rotate"],
    "push test": lambda at: [EVIL],
    "schedule preview": lambda at: [EVIL],
    "schedule create": lambda at: [at.topic, "other", "--cron", "@daily", "--exclude", EVIL],
    "schedule ls": lambda at: [EVIL],
    "schedule show": lambda at: [at.topic, "nightly"],
    "schedule update": lambda at: [at.topic, EVIL, "--cron", EVIL],
    "schedule pause": lambda at: [at.topic, EVIL],
    "schedule resume": lambda at: [at.topic, EVIL],
    "schedule trigger": lambda at: [at.topic, EVIL],
    "schedule backfill": lambda at: [at.topic, "nightly", "--from", EVIL],
    "schedule delete": lambda at: [at.topic, EVIL],
    "schedule import": lambda at: [at.topic, crontab_of(at), "--zone", "UTC"],
    "topic pause": lambda at: [EVIL],
    "topic resume": lambda at: [EVIL],
    "topic drop": lambda at: [EVIL, "--yes"],
    "show": lambda at: [at.topic, EVIL],
    "ls": lambda at: [at.topic, "--payload"],
    "why": lambda at: [at.topic, "dead" + EVIL],
    "late": lambda at: [],
    "dead list": lambda at: [at.topic],
    "dead revive": lambda at: [at.topic, "dead" + EVIL],
    "dead purge": lambda at: [at.topic, "dead" + EVIL, "--group", EVIL, "--yes"],
    "forecast": lambda at: ["--window", "2h"],
    "top": lambda at: ["--once", "--every", "10ms"],
    "cluster": lambda at: [],
    "doctor": lambda at: ["--config", str(at.folder / EVIL.replace("/", ""))],
    "produce": lambda at: [at.topic, EVIL, "--in", "1h", "--id", EVIL, "--group", "other"],
    "move": lambda at: [at.topic, "moved" + EVIL, EVIL, "--in", "2h", "--group", EVIL],
    "cancel": lambda at: [at.topic, "cancelled" + EVIL, "absent" + EVIL, "--group", EVIL],
    "consume": lambda at: [at.topic, "--count", "1"],
    "token create": lambda at: ["--tokens", tokens_of(at), "--name", MARKUP, "--right", "consume"],
    "token list": lambda at: ["--tokens", tokens_of(at)],
    "token revoke": lambda at: ["--tokens", tokens_of(at), EVIL],
    "outbox ddl": lambda at: ["--dialect", "sqlite", "--table", EVIL],
    "outbox relay": lambda at: [outbox_of(at), "--once"],
    "outbox list": lambda at: [outbox_of(at)],
    "outbox retry": lambda at: [outbox_of(at), "1"],
    "outbox purge": lambda at: [outbox_of(at), "1", "--yes"],
    "check-store": lambda at: [f"sqlite:///{at.folder}/{EVIL}/x.db"],
    "store migrate": lambda at: [f"sqlite:///{at.folder}/{EVIL}"],
    "copy": lambda at: [f"sqlite:///{at.folder}/idle.db", f"sqlite:///{at.folder}/copy.db", "--topic", EVIL],
}
"""By command, arguments with which it shows something hostile. The order matters: purge comes after revive."""


def commands(at: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that there is, by its words."""
    if not isinstance(at, click.Group):
        yield " ".join(path)
        return
    context = click.Context(at)
    for name in at.list_commands(context):
        found = at.get_command(context, name)
        assert found is not None
        yield from commands(found, (*path, name))


def assert_printable(text: str) -> None:
    assert [line for line in text.split("\n") if not line.isprintable()] == []


def test_no_command_is_forgotten() -> None:
    there = {name for name in commands(cli) if not name.startswith("bench ")}
    assert there == {*FED, *OWN_DATA, *WITH_SPARK}


@pytest.mark.processes
def test_no_command_gives_a_terminal_orders(stage: Stage, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command, read through a pipe and, as far as that can be had without one, on a terminal in colours."""
    monkeypatch.setenv("TIMELINE_ADDRESS", stage.address)
    shown: set[str] = set()
    for name, arguments in FED.items():
        for colours in ("", "1"):
            monkeypatch.setenv("FORCE_COLOR", colours)
            done = call(*name.split(), *arguments(stage))
            assert "Traceback" not in done.err, (name, done)
            assert_printable(COLOUR.sub("", done.out) + done.err)
            if any(spelt in done.out + done.err for spelt in (SPELT[:20], ascii(EVIL)[1:20], MARKUP)):
                shown.add(name)
    assert shown >= {*FED} - {"forecast", "topic update", "outbox retry", "outbox purge"}


@pytest.mark.processes
def test_following_shows_what_is_hostile_as_it_is(stage: Stage) -> None:
    """Each line of `ls --follow`, as text and as JSON, which stays what it was."""
    for flags in ((), ("--json",)):
        following = start("ls", stage.topic, "--follow", "--payload", *flags, address=stage.address)
        assert following.stdout is not None
        lines = [following.stdout.readline().decode().removesuffix("\n") for _ in range(3)]
        following.terminate()
        following.communicate()
        assert_printable("\n".join(lines))
        if flags:
            assert {json.loads(line)["tag"] for line in lines} == {EVIL}
        else:
            assert all(SPELT[:12] in line for line in lines)


def test_whatever_is_said_is_printable(capfd: pytest.CaptureFixture[str]) -> None:
    surrogate = EVIL + "\ud800"
    say(surrogate, "second")
    complain(surrogate)
    print_json({"id": surrogate, "flag": "🏴\U000e0067"})
    out, err = capfd.readouterr()
    assert_printable(out + err)
    first, second, as_json = out.splitlines()
    assert (first, second, err) == (printable(surrogate), "second", f"timeline: {printable(surrogate)}\n")
    assert json.loads(as_json) == {"id": surrogate, "flag": "🏴\U000e0067"}
    assert printable("Grüße, 東京 🛫") == "Grüße, 東京 🛫"


def test_what_the_driver_logs_is_printable(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    call("version")
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.makeLogRecord({"msg": "gone: %s", "args": (EVIL,), "levelno": logging.WARNING}))
    assert capfd.readouterr().err == f"gone: {SPELT}\n"


def test_log_lines_are_printable() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "lost %s", "args": (EVIL,), "consumer": EVIL, "exc_info": (ValueError, error, error.__traceback__)}
        )
    text, as_json = TextLines().format(record), JsonLines().format(record)
    assert_printable(text)
    assert_printable(as_json)
    assert f"lost {SPELT} consumer={SPELT}" in text.splitlines()[0]
    assert json.loads(as_json)["consumer"] == EVIL


@pytest.mark.slow
def test_a_traceback_is_printable(tmp_path: Path) -> None:
    shown = start("--debug", "topic", "create", EVIL, address="127.0.0.1:1")
    _, errors = shown.communicate(timeout=30)
    assert_printable(errors.decode())
    assert b"Traceback" in errors


def test_an_audits_page_has_no_markup_of_others() -> None:
    script = "<script>alert(1)</script>"
    found = Audit(unended=[script])
    event = {"time": None, "kind": "put", "topic": script, "version": 1, "due": None, "lateness": None,
             "consumer": script, "cause": script}  # fmt: skip
    found.stories[script] = [event]
    found.examples.append(
        {"promise": script, "topic": script, "id": script, "put": None, "last": None, "ended": script, "delivered": 1}
    )
    page = audit_page(found, script)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_outputs_encoding_lacks_is_spelt_out(
    topic: str, tell: Call, address: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    assert tell("produce", topic, "東京", "--in", "1h", "--id", "🛫").code == 0

    def said(*arguments: str) -> bytes:
        started = start(*arguments, address=address)
        out, errors = started.communicate(timeout=30)
        assert (started.returncode, errors) == (0, b"")
        return out

    assert rb"\U0001f6eb" in said("ls", topic)
    assert json.loads(said("ls", topic, "--json"))["id"] == "🛫"
    assert b"1" in said("forecast", topic)
    assert topic.encode() in said("top", "--once")


@pytest.mark.processes
@pytest.mark.parametrize("option", ["--buckets", "--max-deliveries", "--max-payload-bytes", "--max-rate-per-s"])
@pytest.mark.parametrize("digits", [20, 5_000])
def test_numbers_that_nothing_can_carry_are_refused(tell: Call, option: str, digits: int) -> None:
    done = tell("topic", "create", "numbers", option, "9" * digits)
    assert done.code == 2
    assert done.err.startswith("timeline: ") and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert len(done.err) < 200


def test_a_store_that_cannot_be_opened_is_told_once(call: Call, tmp_path: Path) -> None:
    done = call("check-store", f"sqlite:///{tmp_path}/none/timeline.db")
    assert (done.code, done.out, done.err.count("\n")) == (4, "", 1)
    assert "cannot be opened" in done.err


@pytest.mark.parametrize("address", ["a..b:9000", "\udcff:9000", "x" * 3_000 + ":1", "[zz]:1"])
def test_hosts_that_cannot_be_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    done = call("ls", "departures", "--address", address)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "an address is 'host:port'" in done.err


@pytest.mark.processes
def test_a_line_or_a_payload_that_never_ends_is_refused_in_bounded_memory(topic: str, address: str) -> None:
    """Standard input is cut where no topic would take it; the lines before it are put."""
    for flags, said in ((["-"], "standard input has more than"), (["--lines"], "line 2 has more than")):
        process = start("produce", topic, *flags, "--in", "1h", address=address)
        assert process.stdin is not None
        feeding = threading.Thread(target=feed_for_ever, args=(process.stdin,))
        feeding.start()
        assert process.wait() == 4
        assert process.stderr is not None
        assert said in process.stderr.read().decode()
        feeding.join()
        process.communicate()


def feed_for_ever(pipe: IO[bytes]) -> None:
    """A line, then zeros until nobody reads."""
    try:
        pipe.write(b"first\n")
        while True:
            pipe.write(bytes(1 << 20))
    except BrokenPipeError:
        return


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_a_benchmark_of_no_finite_size_is_refused(call: Call, text: str) -> None:
    done = call("bench", "lateness", "--rate", text)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--rate" in done.err
    assert call("bench", "cycle", "--messages", "9" * 30).code == 2
