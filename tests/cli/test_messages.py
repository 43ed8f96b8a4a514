"""Commands on messages, against a real broker: what they print, what they change, how they end."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
from pathlib import Path

import pytest

import timeline
from tests.cli.conftest import TIMELINE, Call, plain_environment, reads_a_pipe, start
from timeline.clock import Clock
from timeline.driver.times import iso

pytestmark = pytest.mark.processes


def piped(address: str, *arguments: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    """A command as a process that is given standard input."""
    environment = plain_environment() | {"TIMELINE_ADDRESS": address}
    return subprocess.run([*TIMELINE, *arguments], input=given, capture_output=True, env=environment, timeout=60)


def test_a_messages_way(tell: Call, topic: str) -> None:
    put = tell(
        "produce", topic, "gate closes", "--in", "10ms", "--id", "UA1545", "--header", "a=b", "--tag", "x", "--json"
    )
    assert put.code == 0
    assert {**put.json[0], "due": 0, "due_ms": 0} == {
        "id": "UA1545", "status": "OK", "version": 1, "due": 0, "due_ms": 0, "settled": False,
        "moved": False,
    }  # fmt: skip
    taken = tell("consume", topic, "--count", 1, "--json")
    assert taken.code == 0
    (delivery,) = taken.json
    assert (delivery["id"], delivery["payload"], delivery["headers"], delivery["tag"]) == (
        "UA1545", "gate closes", {"a": "b"}, "x",
    )  # fmt: skip
    assert delivery["due_ms"] == put.json[0]["due_ms"] and delivery["lateness_ms"] >= 0
    gone = tell("show", topic, "UA1545")
    assert (gone.code, gone.out) == (4, "") and "NOT_FOUND: no message 'UA1545'" in gone.err
    assert "acknowledged, cancelled, purged or expired" in gone.err and "remembers" not in gone.err


def test_how_a_remembered_message_ended_is_not_guessed(tell: Call, topic: str) -> None:
    """The store keeps the id, so that it is not put twice, and nothing that tells an ack from a cancel."""
    assert tell("topic", "update", topic, "--remember", "90m").code == 0
    for id in ("acked", "cancelled"):
        tell("produce", topic, "x", "--in", "0s" if id == "acked" else "1h", "--id", id)
    assert tell("consume", topic, "--count", 1).code == 0
    assert tell("cancel", topic, "cancelled").code == 0
    shown = {id: tell("show", topic, id) for id in ("acked", "cancelled")}
    assert {done.code for done in shown.values()} == {4}
    said = {done.err.replace(repr(id), "'ID'") for id, done in shown.items()}
    assert len(said) == 1 and "remembers such ids for 90m" in said.pop()
    again = tell("produce", topic, "y", "--in", "1h", "--id", "cancelled")
    assert again.code == 0 and "delivered or cancelled before" in again.out


def test_people_read_lines(tell: Call, topic: str) -> None:
    assert "UA1 produced, due 20" in tell("produce", topic, "hello\nthere", "--in", "0s", "--id", "UA1").out
    again = tell("produce", topic, "hello\nthere", "--in", "0s", "--id", "UA1").out
    assert "UA1 not produced again: it is there already, and stays as it is, due 20" in again
    said = tell("consume", topic, "--count", 1).out
    assert "  UA1  hello·there  (+" in said and len(said.splitlines()) == 1


def test_show_has_every_field(tell: Call, topic: str) -> None:
    tell(
        "produce",
        topic,
        "x",
        "--in",
        "1h",
        "--id",
        "a",
        "--tag",
        "t",
        "--expires",
        "2h",
        "--group",
        "ops",
        "--header",
        "k=v",
    )
    text = tell("show", topic, "a", "--tz", "Europe/Berlin").out
    for name, value in {
        "id": "a",
        "state": "waiting",
        "group": "ops",
        "tag": "t",
        "header k": "v",
        "bytes": "1",
    }.items():
        assert any(line.startswith(name) and line.split()[-1] == value for line in text.splitlines()), (name, text)
    assert "expires" in text and ("+01:00" in text or "+02:00" in text)
    told = tell("show", topic, "a", "--json").json[0]
    assert (told["state"], told["version"], told["headers"], told["payload"]) == ("waiting", 1, {"k": "v"}, "x")


def test_bytes_that_are_no_text(tell: Call, topic: str, address: str) -> None:
    done = piped(address, "produce", topic, "-", "--in", "0s", "--id", "raw", given=b"\xff\x00\n")
    assert done.returncode == 0, done.stderr
    assert "<3 bytes>" in tell("show", topic, "raw").out
    told = tell("consume", topic, "--count", 1, "--json").json[0]
    assert base64.b64decode(told["payload_base64"]) == b"\xff\x00\n" and "payload" not in told


def test_lines_of_standard_input(tell: Call, topic: str, address: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(2_500)) + b"last\r\n\nno end"
    done = piped(address, "produce", topic, "--lines", "--in", "1h", "--tag", "bulk", given=lines)
    assert done.returncode == 0, done.stderr
    assert b"2503 of 2503 produced" in done.stdout
    rows = tell("ls", topic, "--all", "--payload", "--json").json
    assert sorted(row["payload"] for row in rows) == sorted(
        [*(f"line {n}" for n in range(2_500)), "last", "", "no end"]
    )
    cut = tell("ls", topic, "--limit", 10)
    assert len(cut.out.splitlines()) == 11 and "there are more than 10" in cut.err
    moved = tell("move", topic, "--tag", "bulk", "--by", "-30m", "--dry-run", "--json").json[0]
    more = {"changed": 2503, "finished": True, "resume": None}
    assert moved == {"matched": 2503, "dry_run": True, "counts": {"OK": 2503}, **more}
    assert "2503 of 2503 moved" in tell("move", topic, "--tag", "bulk", "--in", "2h").out
    assert tell("cancel", topic, "--tag", "bulk", "--json").json[0]["counts"] == {"OK": 2503}
    assert "no message on the timeline has the tag 'bulk'" in tell("cancel", topic, "--tag", "bulk").out
    assert tell("cancel", topic, "--tag", "bulk", "--json").json[0]["matched"] == 0
    assert tell("ls", topic, "--json").out == ""


def test_a_refused_line_does_not_stop_the_others(tell: Call, topic: str, address: str) -> None:
    assert tell("topic", "update", topic, "--max-payload-bytes", 10).code == 0
    done = piped(
        address, "produce", topic, "--lines", "--in", "1h", "--json", given=b"short\n" + b"x" * 20 + b"\nfine\n"
    )
    assert done.returncode == 1
    assert [line.count(b'"OK"') for line in done.stdout.splitlines()] == [1, 0, 1]
    plain = piped(address, "produce", topic, "--lines", "--in", "1h", given=b"x" * 20)
    assert plain.returncode == 1 and b"TOO_LARGE" in plain.stderr and b"0 of 1 produced" in plain.stdout
    assert b"or raise the topic's max_payload_bytes" in plain.stderr


def test_a_due_that_is_past_is_said(tell: Call, topic: str, address: str) -> None:
    done = tell("produce", topic, "x", "--at", "2020-01-01T00:00Z")
    assert (done.code, done.err) == (0, "timeline: --at 2020-01-01T00:00Z is past: it goes out at once\n")
    lines = piped(address, "produce", topic, "--lines", "--at", "now-1h", given=b"a\nb\n")
    assert lines.returncode == 0 and lines.stderr.count(b"--at now-1h is past") == 1
    for timed in (("--at", "now"), ("--in", "0s"), ("--at", "2999-01-01T00:00Z")):
        assert "is past" not in tell("produce", topic, "x", *timed).err


def test_move_and_cancel_by_id(tell: Call, topic: str) -> None:
    for id in ("a", "b"):
        assert tell("produce", topic, id, "--in", "1h", "--id", id).code == 0
    to = iso(Clock().now_ms() // 1000 * 1000 + 86_400_000)
    moved = tell("move", topic, "a", "b", "--to", to, "--json")
    assert [row["due"] for row in moved.json] == [to, to]
    beyond = tell("move", topic, "a", "--in", "20000d")
    assert beyond.code == 2 and "horizon=, --horizon raises it" in beyond.err
    some = tell("move", topic, "a", "nobody", "--in", "3h")
    assert some.code == 1 and "NOT_FOUND 'nobody'" in some.err and "a moved" in some.out
    assert tell("move", topic, "nobody", "--in", "3h").code == 4
    stale = tell("move", topic, "a", "--in", "1h", "--if-version", 1)
    assert stale.code == 4 and "FENCED" in stale.err
    other = tell("cancel", topic, "a", "--group", "others")
    assert other.code == 4 and "FORBIDDEN" in other.err and "--group NAME" in other.err and "token" not in other.err
    assert tell("cancel", topic, "a", "--if-version", 3).code == 0
    assert tell("cancel", topic, "a", "b").code == 1
    assert tell("ls", topic, "--json").json == []


def test_an_id_that_is_taken(tell: Call, topic: str) -> None:
    assert tell("produce", topic, "one", "--in", "1h", "--id", "a").code == 0
    taken = tell("produce", topic, "two", "--in", "2h", "--id", "a")
    assert taken.code == 4 and "EXISTS 'a'" in taken.err and taken.out == ""
    moved = tell("produce", topic, "two", "--in", "2h", "--id", "a", "--if-exists", "move", "--json")
    assert (moved.json[0]["version"], moved.json[0]["moved"]) == (2, True)
    said = tell("produce", topic, "two", "--in", "2h", "--id", "a", "--if-exists", "move")
    assert "a moved: only its due time changed, its payload stays" in said.out
    assert tell("show", topic, "a", "--json").json[0]["payload"] == "one"
    other = tell("produce", topic, "one", "--in", "2h", "--id", "a", "--group", "others")
    assert other.code == 4 and "FORBIDDEN 'a'" in other.err
    replaced = tell("produce", topic, "two", "--in", "2h", "--id", "a", "--if-exists", "replace", "--json")
    assert (replaced.json[0]["version"], replaced.json[0]["moved"]) == (1, False)
    assert tell("show", topic, "a", "--json").json[0]["payload"] == "two"


def test_ls_shows_the_first_by_due(tell: Call, topic: str, address: str) -> None:
    lines = b"".join(b"%d\n" % number for number in range(3_000))
    for due in ("3h", "2h"):
        assert piped(address, "produce", topic, "--lines", "--in", due, given=lines).returncode == 0
    for number in range(5):
        tell("produce", topic, "x", "--in", f"{50 - number}m", "--id", f"early-{number}")
    tell("produce", topic, "x", "--in", "0s", "--id", "due")
    first = tell("ls", topic, "--limit", 3)
    assert [line.split()[2] for line in first.out.splitlines()[1:]] == ["due", "early-4", "early-3"]
    assert "there are more than 3" in first.err

    def ids(*arguments: object) -> list[str]:
        return [row["id"] for row in tell("ls", topic, *arguments, "--json").json]

    assert ids("--state", "waiting", "--limit", 2) == ["early-4", "early-3"]
    assert ids("--state", "available", "--limit", 2) == ["due"]
    assert ids("--due-from", "now+46m", "--limit", 1) == ["early-3"]
    assert len(ids("--limit", 10_000)) == 6_006
    assert tell("consume", topic, "--count", 1, "--release", "1m").code == 0
    assert ids("--limit", 1) == ["due"] and ids("--state", "leased") == []


def test_ls_selects(tell: Call, topic: str) -> None:
    for id, due, tag in (("a", "1h", "x"), ("b", "2h", "x"), ("c", "3h", "y")):
        tell("produce", topic, id, "--in", due, "--id", id, "--tag", tag)
    ids = [row["id"] for row in tell("ls", topic, "--json").json]
    assert ids == ["a", "b", "c"]
    for options, found in (
        (("--tag", "x"), ["a", "b"]),
        (("--due-from", "now+90m"), ["b", "c"]),
        (("--due-to", "now+90m"), ["a"]),
        (("--state", "leased"), []),
        (("--state", "waiting", "--state", "dead"), ["a", "b", "c"]),
    ):
        assert [row["id"] for row in tell("ls", topic, "--json", *options).json] == found, options


def test_exec_acks_on_exit_0_and_puts_back_else(tell: Call, topic: str, tmp_path: Path) -> None:
    tell("topic", "update", topic, "--retry-jitter", "0")
    tell("produce", topic, "good", "--in", "0s", "--id", "good", "--tag", "t")
    out = tmp_path / "out"
    command = f'cat > {out}; echo " $TIMELINE_ID $TIMELINE_TAG $TIMELINE_DELIVERIES" >> {out}'
    done = tell("consume", topic, "--count", 1, "--exec", command)
    assert done.code == 0 and done.out.rstrip().endswith("exit 0")
    assert out.read_text() == "good good t 1\n"
    tell("produce", topic, "bad", "--in", "0s", "--id", "bad")
    failed = tell("consume", topic, "--count", 1, "--exec", "exit 3", "--json")
    assert failed.code == 1 and failed.json[0]["done"] == "exit 3, again in 1s"
    again = tell("consume", topic, "--count", 1, "--exec", "exit 3", "--json")
    assert again.json[0]["deliveries"] == 2 and again.json[0]["done"] == "exit 3, again in 2s"
    assert tell("show", topic, "bad", "--json").json[0]["state"] == "waiting"


def test_exec_buries_with_the_end_of_its_errors_at_the_last_delivery(tell: Call, topic: str) -> None:
    tell("topic", "update", topic, "--max-deliveries", "2", "--retry-first", "1ms")
    tell("produce", topic, "bad", "--in", "0s", "--id", "bad")
    command = "printf 'é%.0s' $(seq 2000) >&2; echo >&2; echo no such host >&2; exit 3"
    first = tell("consume", topic, "--count", 1, "--exec", command, "--json")
    assert first.json[0]["done"] == "exit 3, again in 0.001s"
    last = tell("consume", topic, "--count", 1, "--exec", command, "--json")
    assert (last.code, last.json[0]["done"]) == (1, "exit 3 at the last of 2 deliveries: buried")
    (letter,) = tell("dead", "list", topic, "--json").json
    assert letter["reason"].startswith("max_deliveries: exit 3: é")
    assert letter["reason"].endswith("é\nno such host")
    assert 1022 <= len(letter["reason"].encode()) <= 1024


def test_a_command_without_errors_is_buried_with_its_exit_code(tell: Call, topic: str) -> None:
    tell("topic", "update", topic, "--max-deliveries", "1")
    tell("produce", topic, "bad", "--in", "0s", "--id", "bad")
    tell("consume", topic, "--count", 1, "--exec", "kill -TERM $$")
    (letter,) = tell("dead", "list", topic, "--json").json
    assert letter["reason"] == "max_deliveries: killed by SIGTERM"


def test_release_puts_back(tell: Call, topic: str) -> None:
    tell("produce", topic, "x", "--in", "0s", "--id", "a")
    done = tell("consume", topic, "--count", 1, "--release", "1h")
    assert done.code == 0 and done.out.rstrip().endswith("released")
    told = tell("show", topic, "a", "--json").json[0]
    assert (told["state"], told["deliveries"], told["holder"]) == ("waiting", 1, None)


def test_wait_ends_when_nothing_comes(tell: Call, topic: str) -> None:
    done = tell("consume", topic, "--wait", "100ms")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_leaving_hands_back_what_nobody_saw(
    tell: Call, topic: str, address: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    for id in ("a", "b", "c"):
        tell("produce", topic, id, "--in", "0s", "--id", id)
    started, finish = tmp_path / "started", tmp_path / "finish"
    os.mkfifo(started)
    os.mkfifo(finish)
    consumer = start("consume", topic, "--exec", f"echo > {started}; cat {finish}", address=address, group=0)
    try:
        started.read_bytes()  # the first one is in hand, the others wait in the buffer
        os.killpg(consumer.pid, number)  # Ctrl-C reaches all that the terminal runs: not the command in hand
        finish.write_bytes(b"")
        _, errors = consumer.communicate(timeout=30)
    finally:
        consumer.kill()
        consumer.wait()
    said = b"timeline: interrupted\n" if number is signal.SIGINT else b""
    assert (consumer.returncode, errors) == (code, said)
    rows = tell("ls", topic, "--json").json
    assert [(row["state"], row["deliveries"], row["holder"]) for row in rows] == [("available", 0, None)] * 2


def test_dead_letters_of_a_tag(tell: Call, topic: str, address: str) -> None:
    with timeline.connect_sync(address) as tl, tl.producer(topic) as p:
        for id in ("a", "b", "c", "d"):
            p.produce(b"", in_=0, id=id, tag="odd" if id in "ac" else "even")
            with tl.consumer(topic, id="c", credit=1) as c:
                next(iter(c)).bury(f"reason of {id}")
    newest = tell("dead", "list", topic, "--limit", "2", "--json")
    assert [letter["id"] for letter in newest.json] == ["c", "d"]
    assert newest.err == "timeline: these are the newest 2 of 4; a larger --limit shows more\n"
    assert [letter["id"] for letter in tell("dead", "list", topic, "--tag", "odd", "--json").json] == ["a", "c"]
    newest = tell("dead", "list", topic, "--tag", "odd", "--limit", "1", "--json")
    assert [letter["id"] for letter in newest.json] == ["c"]
    assert tell("dead", "list", topic, "--tag", "none").out == f"{topic} has no dead letters of tag 'none'\n"
    revived = tell("dead", "revive", topic, "--tag", "odd", "--in", "1h", "--json").json
    assert sorted(done["id"] for done in revived) == ["a", "c"]
    nothing = tell("dead", "purge", topic, "--tag", "odd", "--yes").out
    assert nothing == f"{topic} has no dead letters of tag 'odd' of group 'default': nothing purged\n"
    other = tell("dead", "revive", topic, "--all", "--group", "health").out
    assert other.splitlines() == [
        f"{topic} has no dead letters of group 'health': nothing revived",
        "  → --group NAME takes those of 'default' (2)",
    ]
    purged = tell("dead", "purge", topic, "--tag", "even", "--yes", "--json").json
    assert sorted(done["id"] for done in purged) == ["b", "d"]
    for wrong in (("--tag", ""), ("--tag", "odd", "--all"), ("a", "--tag", "odd"), ()):
        assert tell("dead", "purge", topic, *wrong, "--yes").code == 2


def test_dead_letters(tell: Call, topic: str) -> None:
    assert tell("topic", "update", topic, "--max-deliveries", 1).code == 0
    for id in ("a", "b", "c"):
        tell("produce", topic, id, "--in", "0s", "--id", id)
    assert tell("consume", topic, "--count", 3, "--release", "0s").code == 0
    assert tell("consume", topic, "--wait", "300ms").out == ""
    letters = tell("dead", "list", topic, "--json").json
    assert {row["id"]: (row["state"], row["reason"]) for row in letters} == dict.fromkeys(
        "abc", ("dead", "max_deliveries")
    )
    table = tell("dead", "list", topic).out
    assert "REASON" in table and table.count("max_deliveries") == 3
    assert tell("dead", "revive", topic, "a", "--in", "1h").code == 0
    assert tell("show", topic, "a", "--json").json[0]["deliveries"] == 0
    alive = tell("dead", "purge", topic, "a", "--yes")
    assert (
        alive.code == 4
        and alive.err == "timeline: EXISTS 'a': it is no dead letter; 'timeline show' says where it is\n"
    )
    assert tell("dead", "purge", topic, "b", "--yes", "--json").json[0]["status"] == "OK"
    assert tell("dead", "revive", topic, "--all", "--group", "others", "--json").out == ""
    assert tell("dead", "revive", topic, "--all").code == 0
    assert tell("dead", "list", topic, "--json").out == ""


def test_purge_asks_first(tell: Call, topic: str, address: str) -> None:
    tell("topic", "update", topic, "--max-deliveries", 1)
    tell("produce", topic, "x", "--in", "0s", "--id", "a")
    tell("consume", topic, "--count", 1, "--release", "0s")
    tell("consume", topic, "--wait", "300ms")
    done = piped(address, "dead", "purge", topic, "--all", given=b"n\n")
    assert done.returncode == 4 and b"Delete 1 dead letter of" in done.stderr and b"nothing was done" in done.stderr
    absent = piped(address, "dead", "purge", topic, "bad", "worse", given=b"")
    assert absent.returncode == 1 and b"Delete" not in absent.stderr and b"NOT_FOUND 'bad'" in absent.stderr
    some = piped(address, "dead", "purge", topic, "bad", "a", given=b"n\n")
    assert some.returncode == 4 and b"Delete 1 dead letter of" in some.stderr
    unattended = piped(address, "dead", "purge", topic, "--all", given=b"")
    assert (
        unattended.returncode == 2
        and b"there is no terminal to ask" in unattended.stderr
        and b"--yes" in unattended.stderr
    )
    assert len(tell("dead", "list", topic, "--json").json) == 1
    assert piped(address, "dead", "purge", topic, "--all", given=b"y\n").returncode == 0
    assert tell("dead", "list", topic, "--json").json == []


@pytest.mark.parametrize(
    "arguments",
    ["produce nowhere x --in 1s", "consume nowhere --count 1", "move nowhere a --in 1s", "cancel nowhere a",
     "cancel nowhere --tag a", "show nowhere a", "ls nowhere", "dead list nowhere", "dead revive nowhere a",
     "forecast nowhere", "late nowhere", "why nowhere a", "top nowhere --once", "ls nowhere --follow"],
)  # fmt: skip
def test_no_such_topic_is_refused(tell: Call, arguments: str) -> None:
    done = tell(*arguments.split())
    assert (done.code, done.out) == (4, ""), done
    assert "there is no topic 'nowhere'" in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", ["ls {}", "move {} a b --in 1s", "produce {} x --in 1s", "topic show {}"])
def test_a_mistyped_topic_gets_the_near_one(tell: Call, arguments: str) -> None:
    assert tell("topic", "create", "boarding").code == 0
    done = tell(*arguments.format("bording").split())
    assert (done.code, done.out) == (4, "")
    assert "there is no topic 'bording'. Did you mean boarding?" in done.err


def test_lines_for_a_topic_that_is_not_there_are_refused_once(tell: Call, topic: str, address: str) -> None:
    done = piped(address, "produce", topic + "x", "--lines", "--in", "1h", given=b"a\nb\nc\n")
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 1
    assert f"Did you mean {topic}".encode() in done.stderr


def test_an_empty_list_says_so(tell: Call, topic: str) -> None:
    assert tell("ls", topic).out == f"no messages are on {topic}\n"
    assert (
        tell("ls", topic, "--state", "waiting", "--tag", "x").out == f"no messages of tag 'x' are waiting on {topic}\n"
    )
    assert tell("dead", "list", topic).out == f"{topic} has no dead letters\n"
    assert "nothing revived" in tell("dead", "revive", topic, "--all").out


@pytest.mark.parametrize("command", ["consume {} --count 2", "produce {} --lines --in 1h --json", "topic drop {}"])
def test_ctrl_c_ends_at_once_and_quietly(tell: Call, topic: str, address: str, command: str) -> None:
    tell("produce", topic, "x", "--in", "0s", "--id", "first")
    process = start(*(word.format(topic) for word in command.split()), address=address)
    try:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"a line\n" if "--lines" in command else b"")
        process.stdin.flush()
        # It has answered, or asked, and now waits: for a message, a line, a yes.
        if "drop" in command:
            assert process.stderr.read(6) == b"Remove"
            while not reads_a_pipe(process.pid):  # Python hears no signal between its last look and the reading
                pass
        else:
            assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors.endswith(b"timeline: interrupted\n")
    assert b"Traceback" not in errors and b"rror" not in errors
    assert tell("topic", "show", topic).code == 0


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--id", "x" * 256), 2, "an id is 1 to 255 bytes"),
        (("--id", ""), 2, "an id is 1 to 255 bytes"),
        (("--tag", "x" * 65), 2, "a tag is at most 64 bytes"),
        (("--group", ""), 2, "a group is 1 to 255 bytes"),
        (
            ("--header", "k=" + "x" * 9_000),
            4,
            "at most 8192 are allowed; no setting raises this limit: make it smaller",
        ),
        (("--in", "36601d"), 2, "at most 36600 days"),
        (("--in", "20000d"), 2, "horizon"),
        (("--expires", "now-1h"), 2, "expires"),
    ],
)
def test_values_out_of_range(tell: Call, topic: str, options: tuple[str, ...], code: int, said: str) -> None:
    due = () if "--in" in options else ("--in", "1h")
    done = tell("produce", topic, "x", *due, *options)
    assert (done.code, done.out) == (code, ""), done
    assert said in done.err and len(done.err.splitlines()) == 1
    assert tell("ls", topic, "--json").json == []
