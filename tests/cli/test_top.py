"""`timeline top`: what it reads out of brokers' answers, how it draws that, and the live view on a terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import TIMELINE, Call, plain_environment, start
from timeline.cli.look.top import picture, seconds_ahead
from timeline.cli.options import zone_of
from timeline.cli.output import Screen
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings, TopicLoad
from timeline.driver.late import Cause, LateDelivery
from timeline.watcher import Snapshot, TopicSnapshot, Watcher, added_up
from timeline.wire import Health

NOW_MS = 1_774_767_600_000
BOUNDS = (1, 10, None)
LOAD = TopicLoad("t", 3, 1_000, NOW_MS + 5_000, NOW_MS, 2, 7, 93, 500, 1)
BROKER = BrokerStanding(
    "b1:9000", "b1", "0.1.0", NOW_MS, NOW_MS - 60_000, "", "sqlite:///t.db", 1.5, (LOAD,),
    {"t": LatenessHistogram(BOUNDS, (98, 2, 0))}, (),
)  # fmt: skip
TOPIC = TopicSnapshot("departures", "delivers", 0, 1_234, NOW_MS + 4_520, 12.34, 2, 7, 93, 1.0, 10.0, math.inf)
GLANCE = Snapshot(
    now_ms=NOW_MS,
    brokers=(BROKER,),
    unreachable={},
    topics=(TOPIC,),
    ahead=(0, 5, 10, *([1] * 57)),
    overdue=0,
    consumers=(ConsumerStatus("departures", "gate-1", Health.HEALTHY, 93, 1 << 20, 7),),
    late=(LateDelivery("departures", "UA1545", "gate-1", NOW_MS - 700, NOW_MS - 500, Cause.NO_CREDIT),),
)


def drawn(snapshot: Snapshot, width: int = 120, height: int | None = None, trouble: str = "") -> list[str]:
    """The lines of a picture, none of which has an escape: its own texts are printable."""
    screen = io.StringIO()
    Screen(screen, width).print(picture(snapshot, width, height, zone_of("UTC"), trouble))
    assert "\\" not in screen.getvalue()
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_picture_has_load_topics_consumers_and_lateness() -> None:
    lines = drawn(GLANCE)
    text = "\n".join(lines)
    assert lines[0] == "timeline top  2026-03-29 07:00:00"
    assert "● b1  at b1:9000  up 60 s  sqlite:///t.db, leases' p99 1.5 ms  0.1.0" in lines[1]
    assert "DUE PER SECOND  72 in the next 60 s, most 10 at 07:00:02" in text
    (row,) = [line for line in lines if line.startswith("departures  delivers")]
    assert row.split("  ")[-1].strip() == "> 1h" and "in 4.52 s" in row and "1,234" in row and "≤ 10 ms" in row
    assert "gate-1    departures  healthy          7      93" in text
    assert "06:59:59    200 ms  departures  UA1545  gate-1    every consumer was full, or asked for nothing" in text


def test_a_picture_that_is_drawn_once_has_few_late_ones_and_says_that_there_are_more() -> None:
    many = dataclasses.replace(GLANCE, late=GLANCE.late * 50)
    text = "\n".join(drawn(many))
    assert text.count("every consumer was full, or asked for nothing") == 10
    assert "… and more: 'timeline late' has all of them" in text
    few = "\n".join(drawn(dataclasses.replace(GLANCE, late=GLANCE.late * 10)))
    assert few.count("every consumer was full, or asked for nothing") == 10 and "… and more" not in few


def test_a_picture_of_nothing_says_so() -> None:
    empty = dataclasses.replace(GLANCE, topics=(), consumers=(), late=(), ahead=(0,) * 60)
    text = "\n".join(drawn(empty))
    assert "none yet" in text and "no consumer is connected" in text and "nothing was more than 50 ms late" in text


def test_trouble_is_seen() -> None:
    down = dataclasses.replace(BROKER, trouble="the store is down: disk full", warnings=("fsync is off: set it to on",))
    text = "\n".join(
        drawn(dataclasses.replace(GLANCE, brokers=(down,), unreachable={"b2:9000": "nobody listens"}, overdue=4), 160)
    )
    assert "! store of b1: fsync is off: set it to on" in text
    assert "the store is down: disk full" in text and "✗ b2:9000: nobody listens" in text
    assert "4 due and not delivered" in text
    narrow = drawn(dataclasses.replace(GLANCE, brokers=(down,)), 60)[1]
    assert narrow.startswith("  ● b1  the store is down: disk full")  # the cause is not what is cut
    unknown = drawn(dataclasses.replace(GLANCE, brokers=(down,), unknown="the store is down"))
    assert unknown[-2:] == ["", "Topics, load and late deliveries are not known: the store is down"]
    assert drawn(GLANCE, trouble="how it stood; UNAVAILABLE")[0].endswith("UNAVAILABLE")


@pytest.mark.parametrize(("width", "height"), [(120, 30), (90, 26), (60, 24), (200, 50)])
def test_a_picture_keeps_to_the_screen(width: int, height: int) -> None:
    many = dataclasses.replace(
        GLANCE,
        ahead=(3,) * seconds_ahead(width),
        topics=tuple(dataclasses.replace(TOPIC, name=f"topic {at}") for at in range(100)),
        consumers=GLANCE.consumers * 100,
        late=GLANCE.late * 50,
    )
    lines = drawn(many, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    shown = sum(line.startswith("topic") for line in lines)
    assert shown >= 2 and f"… and {100 - shown} topics more" in lines


def test_where_there_is_no_room_for_all_topics_the_busiest_are_shown() -> None:
    quiet = [dataclasses.replace(TOPIC, name=f"quiet {at}", delivered_per_s=0.0, in_flight=0) for at in range(100)]
    busy = [dataclasses.replace(TOPIC, name=f"z busy {at}", due=at + 1) for at in range(2)]
    lines = drawn(dataclasses.replace(GLANCE, topics=(*quiet, *busy), consumers=(), late=()), 120, 24)
    assert [line.split("  ")[0] for line in lines if "busy" in line] == ["z busy 0", "z busy 1"]
    assert "z busy" not in "".join(drawn(dataclasses.replace(GLANCE, topics=tuple(quiet)), 120, 24))


def test_loads_of_brokers_that_share_a_store_are_added_up() -> None:
    later = dataclasses.replace(LOAD, available=9, counted_ms=NOW_MS + 1, delivered=50)
    other = dataclasses.replace(BROKER, address="b2:9000", topics=(later,))
    (load,) = added_up(Standings((BROKER, other), {})).values()
    assert (load.available, load.waiting) == (9, 1_000)  # the latest count
    assert (load.consumers, load.in_flight, load.credit, load.delivered) == (4, 14, 186, 550)


async def test_rates_and_percentiles_are_of_what_came_between_looks() -> None:
    watcher = Watcher(None)  # type: ignore[arg-type]
    watcher._remember(Standings((BROKER,), {}))
    assert watcher._rate("t") is None
    assert watcher._lateness("t") == LatenessHistogram(BOUNDS, (98, 2, 0))
    later = dataclasses.replace(
        BROKER,
        now_ms=NOW_MS + 2_000,
        topics=(dataclasses.replace(LOAD, delivered=520),),
        lateness={"t": LatenessHistogram(BOUNDS, (98, 22, 0))},
    )
    watcher._remember(Standings((later,), {}))
    assert watcher._rate("t") == 10.0 and watcher._lateness("t") == LatenessHistogram(BOUNDS, (0, 20, 0))
    anew = dataclasses.replace(later, now_ms=NOW_MS + 4_000, started_ms=NOW_MS + 3_000)
    watcher._remember(Standings((anew,), {}))
    assert watcher._rate("t") == 0.0 and watcher._lateness("t") == LatenessHistogram(BOUNDS, (98, 22, 0))


@pytest.mark.prove
@pytest.mark.processes
def test_a_broker_whose_store_is_gone_is_shown_with_what_it_says(tmp_path: Path) -> None:
    """Nothing else can be told then, so it does not look again after --every. A put makes the broker look for its
    file."""
    file = tmp_path / "t.db"
    broker = start("serve", "--store", f"sqlite:///{file}", "--listen", "127.0.0.1:0", "--metrics", "off", "--json")
    try:
        assert broker.stdout is not None
        environment = plain_environment() | {"TIMELINE_ADDRESS": json.loads(broker.stdout.readline())["listen"]}

        def tell(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*TIMELINE, *words], capture_output=True, text=True, env=environment)

        assert tell("topic", "create", "t").returncode == 0
        file.unlink()
        assert tell("produce", "t", "x", "--in", "1h").returncode
        seen, told = (tell("top", form, "--every", "1h") for form in ("--once", "--json"))
    finally:
        broker.terminate()
        broker.communicate(timeout=30)
    assert seen.returncode == told.returncode == 0, seen.stderr + told.stderr
    assert "t.db cannot be found" in seen.stdout and "\\" not in seen.stdout
    assert "\n\nTopics, load and late deliveries are not known: " in seen.stdout
    assert "t.db cannot be found" in json.loads(told.stdout)["unknown"]


@pytest.mark.slow
def test_top_for_machines_and_once(tell: Call, topic: str) -> None:
    for due in ("0s", "5s", "1h"):
        tell("produce", topic, "x", "--in", due)
    assert tell("consume", topic, "--count", 1, "--id", "worker-1").code == 0
    (told,) = tell("top", "--json", "--every", "10ms").json
    (one,) = [each for each in told["topics"] if each["name"] == topic]
    assert (one["state"], one["due"], one["consumers"], one["delivered_per_s"]) == ("delivers", 0, 0, 0)
    late = one["lateness_ms"]
    assert 0 < late["p50"] == late["p99"] == late["max"]  # of the one delivery, though it was before the first look
    (broker,) = told["brokers"]
    assert broker["trouble"] is None and broker["store"] == "sqlite:///timeline.db"
    assert len(told["due_per_s_ahead"]) >= 60 and sum(told["due_per_s_ahead"]) >= 1
    tell("topic", "pause", topic)
    text = tell("top", topic, "--once", "--every", "10ms").out
    assert f"{topic}" in text and "paused" in text and "DUE PER SECOND" in text and "no consumer is connected" in text
    assert "\x1b" not in text


@pytest.mark.processes
@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_the_live_view_ends_on_a_key_and_leaves_the_terminal_as_it_was(address: str, key: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    environment = plain_environment() | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    watching = subprocess.Popen(
        [*TIMELINE, "top", "--address", address, "--every", "20ms"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while b"no consumer is connected" not in seen:
            seen += os.read(ours, 65_536)
        os.write(ours, key)
        while b"\x1b[?1049l" not in seen:  # back from the alternate screen
            seen += os.read(ours, 65_536)
        _read_out(ours)
        assert watching.wait(30) == code
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
    assert b"DUE PER SECOND" in seen and b"Traceback" not in seen


def _own_terminal() -> None:
    """Makes standard input the process's terminal, so that Ctrl-C typed there is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_out(terminal: int) -> None:
    """Reads until the other side has closed the terminal."""
    try:
        while os.read(terminal, 65_536):
            pass
    except OSError:
        return  # how a terminal ends


def test_the_help_names_what_tells_that_something_is_missing(call: Call) -> None:
    said = call("top", "--help").out
    assert "unknown" in said and "unreachable" in said
