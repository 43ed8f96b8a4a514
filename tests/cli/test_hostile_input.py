"""What somebody else chose (ids, reasons, URLs) neither gives a terminal orders nor ends in a traceback."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import IO

import pytest

import timeline
from tests.cli.conftest import Call, start
from timeline.cli.output import plain

EVIL = "a\x1b]0;owned\x07\x9b2J\nb\u202e"
SPELT = r"a\x1b]0;owned\x07\x9b2J\nb\u202e"


def test_plain_spells_out_what_a_terminal_would_obey() -> None:
    assert plain(EVIL) == SPELT
    assert plain("Grüße, 東京 🛫") == "Grüße, 東京 🛫"


@pytest.mark.processes
def test_others_texts_are_shown_spelt_out(topic: str, tell: Call, address: str) -> None:
    with timeline.connect_sync(address) as tl, tl.producer(topic, group=EVIL) as p:
        p.produce(EVIL.encode(), in_="1h", id=EVIL, tag=EVIL, headers={EVIL: EVIL})
    said = [
        tell("show", topic, EVIL).out,
        tell("ls", topic, "--payload").out,
        tell("move", topic, EVIL, "--in", "0s", "--group", EVIL).out,
        tell("consume", topic, "--count", "1").out,
    ]
    for text in said:
        assert SPELT in text
        assert all(line.isprintable() for line in text.splitlines()), text


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
