"""What cannot be meant is refused before anything is done; what was refused is named, and nothing is said to be
done that was not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import TIMELINE, Call, plain_environment

pytestmark = pytest.mark.processes


def in_a_shell(
    redirected: str, *arguments: str, address: str = "", given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Runs the command line from a shell that redirects as `redirected` says."""
    environment = plain_environment() | ({"TIMELINE_ADDRESS": address} if address else {})
    line = ["sh", "-c", f'exec "$@" {redirected}', "sh", *TIMELINE, *arguments]
    return subprocess.run(line, input=given, capture_output=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("command", "said"),
    [("", "is empty"), (" \n", "is empty"), ("-x", "no program '-x'"), ("/tmp", "no program '/tmp'")],
)
def test_a_command_that_is_none_is_refused_before_anything_is_taken(
    tell: Call, topic: str, command: str, said: str
) -> None:
    """A shell with nothing to run ends with 0: each message would be acknowledged, and nobody would have seen it."""
    tell("produce", topic, "x", "--in", "0s", "--id", "a")
    done = tell("consume", topic, "--count", 1, "--exec", command)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1) and said in done.err
    assert tell("show", topic, "a", "--json").json[0]["deliveries"] == 0


def test_nothing_is_called_released_that_was_not(tell: Call, topic: str) -> None:
    tell("produce", topic, "x", "--in", "0s")
    refused = tell("consume", topic, "--count", 1, "--release", "3661d")
    assert (refused.code, refused.out) == (1, "") and "horizon" in refused.err
    done = tell("consume", topic, "--count", 1, "--release", "1h", "--json")
    assert (done.code, done.json[0]["done"]) == (0, "released")


@pytest.mark.parametrize(
    "url",
    [
        "foo://bar", "postgres://x", "sqlite://foo/bar", "sqlite:///x.db?nope=1", "sqlite:///x.db?cache_mib=x",
        "redis://host:x/0", "memory://?payloads=", "x://",
    ],
)  # fmt: skip
def test_a_url_that_names_no_store_is_a_usage_error(
    url: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--store", url),
        ("check-store", url),
        ("copy", url, "memory://", "--topic", "t"),
        ("copy", "memory://", url, "--topic", "t"),
        ("store", "migrate", url),
        ("bench", "cycle", "--store", url, "--messages", "16"),
    ):
        done = call(*arguments)
        assert (done.code, len(done.err.splitlines())) == (2, 1), (arguments, done)
    assert not list(tmp_path.iterdir())


def test_a_store_that_refuses_a_good_url_is_no_usage_error(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but a text that is longer than one's header is" * 9)
    assert call("check-store", f"sqlite:///{tmp_path}/text.db").code == 4


@pytest.mark.parametrize("command", [("store", "migrate"), ("check-store",)])
def test_a_store_that_nobody_serves_is_unreachable(call: Call, command: tuple[str, ...]) -> None:
    done = call(*command, "redis://127.0.0.1:1/0")
    assert (done.code, len(done.err.splitlines())) == (3, 1) and done.err.startswith("timeline: UNAVAILABLE: ")


def test_a_schema_that_is_not_there_is_not_made(call: Call, tmp_path: Path) -> None:
    done = call("store", "migrate", f"sqlite:///{tmp_path}/nope.db")
    assert done.code == 4 and "there is no file" in done.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("-",), ("--lines",)])
def test_a_closed_input_is_no_empty_one(tell: Call, topic: str, address: str, arguments: tuple[str, ...]) -> None:
    done = in_a_shell("<&-", "produce", topic, *arguments, "--in", "1h", address=address)
    assert (done.returncode, done.stdout) == (2, b"") and b"standard input is closed" in done.stderr
    assert tell("ls", topic, "--json").json == []


def test_nobody_answers_from_a_closed_input(tell: Call, topic: str, address: str) -> None:
    done = in_a_shell("<&-", "topic", "drop", topic, address=address)
    assert done.returncode == 2 and b"there is no terminal to ask, so nothing was done" in done.stderr
    assert tell("topic", "show", topic).code == 0


def test_what_is_said_into_a_closed_output_is_not_wanted(tell: Call, topic: str, address: str) -> None:
    done = in_a_shell(">&-", "produce", topic, "x", "--in", "1h", address=address)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(tell("ls", topic, "--json").json) == 1


def test_a_shift_that_is_refused_says_why(tell: Call, topic: str) -> None:
    tell("produce", topic, "x", "--in", "1h", "--tag", "late")
    done = tell("move", topic, "--tag", "late", "--by", "3660d")
    assert (done.code, done.out) == (1, "0 of 1 moved; 1 INVALID\n") and "INVALID: these would come due" in done.err


def test_lines_that_are_refused_are_named_by_number(topic: str, address: str) -> None:
    lines = b"a\n" + b"b" * 2_000_000 + b"\nc\n"
    done = in_a_shell("", "produce", topic, "--lines", "--in", "1h", address=address, given=lines)
    (said,) = done.stderr.decode().splitlines()
    assert done.returncode == 1 and said.startswith("timeline: line 2: TOO_LARGE: ")
    far = in_a_shell("", "produce", topic, "--lines", "--in", "3700d", address=address, given=b"a\nb\n")
    assert [said.partition(": the due")[0] for said in far.stderr.decode().splitlines()] == [
        "timeline: line 1",
        "timeline: line 2",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-5", "--expires must not be negative, not '-5s'"),
        ("99999d", "--expires must be at most 36600 days, not '99999d'"),
        ("0s", "--expires must be at least 1 ms, not '0s'"),
        ("5x", "--expires must be numbers with a unit"),
        ("now-1h", "--expires 'now-1h' is over already"),
        ("now", "--expires 'now' is over already"),
        ("soon", "--expires 'soon' is no time"),
        ("20300101", "does not say in which time zone: add the offset (20300101T00:00Z is UTC)"),
        ("2030-01-01 09", "does not say in which time zone: add the offset (2030-01-01 09Z is UTC)"),
        ("2030-01-01T09.30Z", "--expires '2030-01-01T09.30Z' is no time"),
    ],
)
def test_an_expiry_that_cannot_be_is_judged_as_what_it_is(call: Call, text: str, said: str) -> None:
    done = call("produce", "t", "x", "--in", "0s", "--expires", text)
    assert done.code == 2 and said in done.err


def test_an_expiry_without_a_unit_is_seconds(tell: Call, topic: str) -> None:
    assert tell("produce", topic, "x", "--in", "1h", "--expires", "7200", "--id", "a").code == 0
    stored = tell("show", topic, "a").out
    assert "expires" in stored
    assert tell("produce", topic, "x", "--in", "2h", "--expires", "3600").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "t", "x", "--in", "1m"),
        ("produce", "t", "x", "--at", "now+1h"),
        ("move", "t", "a", "--in", "1m"),
        ("move", "t", "--tag", "a", "--by", "1h"),
    ],
)
def test_a_zone_that_does_not_exist_is_refused_also_where_none_is_needed(
    call: Call, arguments: tuple[str, ...]
) -> None:
    done = call(*arguments, "--tz", "Mars/Base")
    assert done.code == 2 and "no time zone 'Mars/Base'" in done.err


@pytest.mark.parametrize("command", ["topic show", "late", "top --once"])
def test_an_empty_name_is_no_topic_that_is_missing(tell: Call, command: str) -> None:
    done = tell(*command.split(), "")
    assert done.code == 2 and "a topic's name is 1 to 255" in done.err


def test_a_consumers_id_that_is_empty_is_not_taken_for_none(tell: Call, topic: str) -> None:
    done = tell("consume", topic, "--id", "", "--wait", "1ms")
    assert done.code == 2 and "a consumer's id is 1 to 255" in done.err


def test_a_limit_is_not_dropped_for_all(call: Call) -> None:
    done = call("ls", "t", "--limit", 1, "--all")
    assert done.code == 2 and "--limit and --all" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "t", "x", "--in", "1m", "--id", "a\udcff"),
        ("produce", "t", "x", "--in", "1m", "--header", "k=\udcff"),
        ("cancel", "t", "a", "b\udcff"),
        ("ls", "\udcff"),
        ("topic", "show", "\udcff"),
    ],
)
def test_bytes_that_are_no_text_are_called_so(call: Call, arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.code == 2 and "text in UTF-8, not" in done.err and "surrogate" not in done.err


def test_one_bad_id_does_not_keep_the_others(tell: Call, topic: str) -> None:
    for id in ("a", "b"):
        tell("produce", topic, "x", "--in", "1h", "--id", id)
    moved = tell("move", topic, "a", "", "b", "--in", "2h")
    assert (moved.code, len(moved.out.splitlines())) == (1, 2) and "ids[1]: an id is 1 to 255 bytes" in moved.err
    assert [line["status"] for line in tell("cancel", topic, "a", "", "b", "--json").json] == ["OK", "INVALID", "OK"]
    assert tell("cancel", topic, "").code == 2
