"""Bad input: one clear line, the right exit code, never a traceback. None of it needs a broker."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

import timeline
from tests.cli.conftest import Call, plain_environment, start
from timeline.cli.app import COMMANDS, GROUPS, cli
from timeline.cli.options import Duration
from timeline.config import ServeConfig
from timeline.driver.transport.addresses import DEFAULT_ADDRESS
from timeline.errors import Unavailable

NOBODY = "127.0.0.1:1"


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group by its words."""
    found: list[tuple[str, ...]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


def test_every_command_of_the_contract_is_there() -> None:
    words = {" ".join(path) for path in commands()}
    topic = {f"topic {name}" for name in ("create", "list", "show", "update", "pause", "resume", "drop")}
    dead = {f"dead {name}" for name in ("list", "revive", "purge")}
    outbox = {f"outbox {name}" for name in ("relay", "ddl", "list", "retry", "purge")}
    single = {
        "serve", "produce", "consume", "move", "cancel", "show", "ls", "forecast", "late", "why", "top", "bench",
        "check-store", "outbox", "doctor", "demo", "completion", "version",
    }  # fmt: skip
    assert words >= topic | dead | outbox | single


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(call: Call, path: tuple[str, ...]) -> None:
    done = call(*path, "--help")
    assert done.code == 0
    assert re.search(rf"Example:\n\s+.*timeline {path[0]}", done.out), done.out
    assert done.out == call(*path, "-h").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serv", "there is no command 'serv'. Did you mean serve?"),
        ("topic lst", "there is no command 'lst'. Did you mean list?"),
        ("topic xyzzy", "There are: create, drop, list"),
        ("dead reviv t", "Did you mean revive?"),
        ("serve --lsten x", "there is no option --lsten. Did you mean --listen?"),
        ("produce t x --inn 5s", "Did you mean --in?"),
        ("produce t x --bogus", "there is no option --bogus. See 'timeline produce --help'"),
        ("produce t x --in", "See 'timeline produce --help'"),
        ("topic create t --lease", "See 'timeline topic create --help'"),
        ("produce t x --json=3", "does not take a value. See 'timeline produce --help'"),
        ("serve --port 9100", "there is no option --port. See 'timeline serve --help'"),
        ("publish t x --in 5s", "there is no command 'publish'. There are: produce, consume"),
        ("topic delete t", "there is no command 'delete'. There are: create, drop, list"),
        ("dead retry t --all", "There are: list, purge, revive"),
        ("hlp", "Did you mean help?"),
        ("dead hello", "There are: list, purge, revive"),
        ("help tpic", "Did you mean topic?"),
        ("ls t --stat waiting", "Did you mean --state?"),
        ("ls t --state waitin", "'waitin' is not one of"),
        ("ls t --limit 0", "0 is not in the range"),
        ("ls t --due-from yesterday", "--due-from 'yesterday' is no time"),
        ("ls t --due-from now --due-to now-1h", "--due-from must lie before --due-to"),
        ("ls t --tz Mars", "no time zone 'Mars' is known"),
        ("ls", "Missing argument 'TOPIC'"),
        ("produce t", "either --at (a time) or --in"),
        ("produce t --in 5s", "give a PAYLOAD"),
        ("produce t x --in 5s --lines", "give neither PAYLOAD nor --id"),
        ("produce t --in 5s --lines --id a", "give neither PAYLOAD nor --id"),
        (
            "produce t stand up --in 5s",
            "unexpected extra arguments: up. Put quotes around values with spaces",
        ),
        ("produce t x", "either --at (a time) or --in"),
        ("produce t x --at now --in 5s", "one of the two"),
        ("produce t x --at 2026-03-29T09:00", "does not say in which time zone"),
        ("produce t x --at 2026-03-29", "add the offset (2026-03-29T00:00Z is UTC)"),
        ("bench cycle --folder /nowhere", "'/nowhere' does not exist"),
        ("bench plot --into /nowhere", "'/nowhere' does not exist"),
        ("produce t x --in soon", "--in must be numbers with a unit"),
        ("produce t x --in -5s", "--in must not be negative, not '-5s'"),
        ("produce t x --in=-1h5m", "--in must not be negative"),
        ("produce t x --in=-soon", "--in must be numbers with a unit"),
        ("produce t x --in 5s --header a", "--header is name=value"),
        ("produce t x --in 5s --expires soon", "--expires 'soon' is no time"),
        ("produce t x --in 5s --expires 1s", "expires must lie after the due time"),
        ("produce t x --in 5s --if-exists keep", "'keep' is not one of"),
        ("produce t x --in 5s --timeout 0s", "timeout must be at least 1 ms"),
        ("consume t --count 0", "0 is not in the range"),
        ("consume t --credit many", "'many' is not a valid integer"),
        ("consume t --lease 0s", "--lease must be at least 1 ms"),
        ("consume t --release 1s --exec true", "give one of the two"),
        ("move t", "either one or more IDs, or --tag"),
        ("move t a", "--to TIME or --in DURATION, for IDs and for a --tag; or --by DURATION"),
        ("move t a --at now --in 1s", "one of the two"),
        ("move t a --tag b --in 1s", "one of the two"),
        ("move t a --by 1h", "--by shifts all messages of a --tag"),
        ("move t --tag x --by 1h --in 1s", "goes without --to and --in"),
        ("move t --tag x --by never", "--by must be"),
        ("move t --tag x --by 0s", "timeline: --by must shift by at least 1 ms"),
        ("produce t x --at 9999-12-31T23:59:59-12:00", "timeline: --at must be at most"),
        ("produce t x --in 1h --expires 9999-12-31T23:59:59-12:00", "timeline: --expires must be at most"),
        (
            "topic update t --buckets 5",
            "A topic's buckets are fixed when it is created: 'timeline topic create NAME --b",
        ),
        ("topic update t --kind timeline", "A topic's kind is fixed when it is created"),
        ("topic update t --paused", "'timeline topic pause NAME' pauses a topic"),
        ("topic create t --paused", "no option --paused. 'timeline topic pause NAME' pauses a topic that is there"),
        ("topic create t --kind timeline", "'timeline' is the only kind of topic"),
        ("move t a b --in 1s --if-version 1", "--if-version goes with one ID"),
        ("move t a --in 1s --dry-run", "--dry-run goes with --tag"),
        ("cancel t", "either one or more IDs, or --tag"),
        ("cancel t a --if-version x", "'x' is not a valid integer"),
        ("dead revive t", "one or more IDs, --tag, or --all"),
        ("dead purge t a --all", "one or more IDs, --tag, or --all"),
        ("topic create t --lease forever", "--lease must be numbers with a unit"),
        ("topic create t --buckets many", "--buckets must be a whole number"),
        ("topic create t --max-rate-per-s -1", "--max-rate-per-s must not be negative, not '-1'"),
        ("topic list --token-file /nowhere", "cannot be read: No such file or directory (--token-file, or TIMELINE_"),
        ("topic list --tls-ca /nowhere", "cannot be read: No such file or directory (--tls-ca, or TIMELINE_TLS_CA)"),
        ("topic list --tls-cert /nowhere", "(--tls-cert and --tls-key, or TIMELINE_TLS_CERT and TIMELINE_TLS_KEY)"),
        ("topic create t --max-payload-bytes 1TB", "a size is a number of bytes"),
        ("topic update t", "give at least one setting"),
        ("forecast t --step 0s", "--step must be at least 1 ms"),
        ("forecast t --window soon", "--window must be numbers with a unit"),
        ("late --since 0s", "--since must be at least 1 ms"),
        ("late --limit 0", "0 is not in the range"),
        ("why t", "Missing argument 'ID'"),
        ("top --every 0s", "--every must be at least 1 ms"),
        ("top --tz Mars", "no time zone 'Mars' is known"),
        ("ls t --follow --every never", "--every must be numbers with a unit"),
        ("completion tcsh", "'tcsh' is not one of"),
        ("doctr", "Did you mean doctor?"),
        ("check-store", "give the store's URL"),
        ("check-store memory:// --only nope", "no such check: 'nope'. 'timeline check-store --list'"),
        ("check-store redis://nowhere.invalid --only Put_That_Move", "Did you mean put_that_moves"),
        ("serve --listen x", "an address is host:port"),
        ("serve --config /nowhere.toml", "cannot be read"),
        ("demo --speed 0", "the speed must be from 1 to 20000"),
        ("demo --speed nan", "the speed must be from 1 to 20000"),
        ("demo --speed 1e9", "the speed must be from 1 to 20000"),
        ("demo --day soon", "YYYY-MM-DD"),
        ("demo --day 2013-05-05", "--data flights_2013.parquet"),
        ("demo --data /nowhere", "cannot be read"),
        ("ls t --address nowhere", "Did you mean nowhere:9000?"),
        ("ls t --address http://localhost:9005/", "Did you mean localhost:9005?"),
        ("ls t --address :9005,b:1", "Did you mean localhost:9005,b:1?"),
        ("ls t --address a:b:c", "an address is 'host:port'"),
        ("--json ls t", "options stand after it: 'timeline COMMAND … --json'"),
        ("--verson", "Did you mean --version?"),
        ("version --jsn", "Did you mean --json?"),
        ("serve --store reminders.db", "did you mean sqlite:///reminders.db?"),
        ("serve --store sqlite:/reminders.db", "did you mean sqlite:///reminders.db?"),
        ("serve --listen 127.0.0.1:0 --metrics off --sync locl://", "Did you mean local://?"),
    ],
)
def test_a_mistake_gets_the_sentence_that_mends_it(call: Call, arguments: str, said: str) -> None:
    done = call(*arguments.split())
    assert done.code == 2, done
    assert done.out == ""
    assert said in done.err
    assert len(done.err.splitlines()) == 1, done.err


@pytest.mark.parametrize(
    "arguments",
    [
        "topic list",
        "topic create t",
        "produce t x --in 5s",
        "consume t --count 1",
        "move t a --in 1s",
        "cancel t --tag a",
        "show t a",
        "ls t",
        "dead list t",
        "forecast t",
        "forecast",
        "late",
        "why t a",
        "top --once",
        "ls t --follow",
    ],
)
def test_nobody_there(call: Call, arguments: str) -> None:
    done = call(*arguments.split(), "--address", NOBODY, "--timeout", "50ms")
    assert done.code == 3, done
    assert done.out == ""
    assert done.err.startswith(f"timeline: UNAVAILABLE: no broker at {NOBODY} (nothing listens there).")
    assert "timeline serve" in done.err and "--address" in done.err and "TIMELINE_ADDRESS" in done.err
    assert done.err.count(NOBODY) == 1
    assert len(done.err.splitlines()) == 1, done.err


@pytest.mark.parametrize(
    "arguments",
    [
        "produce t x --in 5",
        "produce t x --at now+5",
        "move t a --in 0.5",
        "move t --tag x --by -5",
        "ls t --timeout 0.05",
        "consume t --lease 30 --wait 1",
        "forecast t --window 60 --step 5",
        "topic create t --remember 60 --lease 5",
    ],
)
def test_a_number_without_a_unit_is_seconds(call: Call, arguments: str) -> None:
    more = [] if "--timeout" in arguments else ["--timeout", "50ms"]
    done = call(*arguments.split(), "--address", NOBODY, *more)
    assert (done.code, done.out) == (3, ""), done  # understood; there is only nobody to ask


def test_every_option_that_takes_a_duration_takes_bare_seconds() -> None:
    context = click.Context(cli)
    for path in commands():
        command: click.Command | None = cli
        for word in path:
            assert isinstance(command, click.Group)
            command = command.get_command(context, word)
        assert command is not None
        for option in command.params:
            takes = option.metavar or option.type.name
            if takes.endswith("DURATION") and not takes.startswith("TIME|") and path != ("serve",):
                assert isinstance(option.type, Duration), (path, option.name)


def test_no_arguments_show_the_help(call: Call) -> None:
    done = call()
    assert (done.code, done.err) == (2, "")
    assert re.findall(r"^(\w+):$", done.out, re.MULTILINE) == ["Options", *GROUPS]
    assert all(re.search(rf"^  {name} +[A-Z]", done.out, re.MULTILINE) for name in COMMANDS)
    assert "Exit codes: 0 done, 1 some failed, 2 usage, 3 unreachable, 4 refused, 130 interrupted." in " ".join(
        done.out.split()
    )


def test_connection_options_are_shown_once(call: Call) -> None:
    shown = call("help", "connection")
    assert shown.code == 0
    for option in ("--address", "--timeout", "--tls", "--tls-ca", "--tls-cert", "--tls-key", "--token-file"):
        assert re.search(rf"^  {option} ", shown.out, re.MULTILINE), option
    assert shown.out.count("TIMELINE_") == 7  # each variable, and the one that holds the token itself
    for path in (("ls",), ("topic", "create"), ("outbox", "relay")):
        helped = " ".join(call(*path, "--help").out.split())
        assert "timeline help connection" in helped and "--tls" not in helped and "--json" in helped


def test_help_of_a_command_is_what_its_option_shows(call: Call) -> None:
    assert call("help").out == call("--help").out
    assert call("help", "topic", "create").out == call("topic", "create", "--help").out


def test_a_store_that_nobody_knows_is_refused(call: Call) -> None:
    for command in (("serve", "--listen", "127.0.0.1:0", "--store", "sqlit:///x"), ("check-store", "sqlit:///x")):
        done = call(*command)
        assert done.code == 2
        assert "did you mean sqlite://" in done.err.lower()


def test_debug_shows_where_it_came_from(call: Call) -> None:
    with pytest.raises(Unavailable):
        call("--debug", "ls", "t", "--address", NOBODY, "--timeout", "50ms")


@pytest.mark.slow
def test_somebody_there_who_is_no_broker(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = call("topic", "list", "--address", address, "--timeout", "300ms")
    assert done.code == 3 and "no broker at" not in done.err and address in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_a_name_that_nobody_knows(call: Call) -> None:
    done = call("topic", "list", "--address", "no.such.name.invalid:9000", "--timeout", "300ms")
    assert done.code == 3 and "this host name is not known" in done.err


def test_version(call: Call) -> None:
    assert re.fullmatch(r"timeline \d\S*\n", call("version").out)
    assert call("--version").out == call("version").out
    (told,) = call("version", "--json").json
    assert (told["version"], told["wire"].partition(".")[0]) == (timeline.__version__, "1")


def test_default_address_is_the_brokers_default_port() -> None:
    assert DEFAULT_ADDRESS.rpartition(":")[2] == ServeConfig().listen.rpartition(":")[2]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "/x"), 4, "/x: Permission denied"),
        (OSError(28, "No space left on device"), 4, "No space left"),
        (ConnectionRefusedError(111, "Connection refused"), 3, "Connection refused"),
        (TimeoutError(), 3, "TimeoutError"),
    ],
)
def test_what_the_system_refuses(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, said: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("timeline.cli.about.get_completion_class", refuse)
    done = call("completion", "bash")
    assert (done.code, done.out) == (code, "") and said in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--listen", "--metrics"])
@pytest.mark.slow
def test_serve_on_a_port_of_another_program(call: Call, tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        ports = {"--listen": "127.0.0.1:0", "--metrics": "off", option: taken}
        done = call("serve", "--store", "memory://", *(word for pair in ports.items() for word in pair))
    assert (done.code, done.out) == (4, "")
    assert f"{taken} is taken" in done.err and option in done.err and len(done.err.splitlines()) == 1


def test_serve_on_an_address_of_another_machine(call: Call) -> None:
    done = call("serve", "--store", "memory://", "--metrics", "off", "--listen", "192.0.2.1:9000", "--insecure")
    assert (done.code, done.out) == (4, "")
    assert "192.0.2.1:9000: that is no address of this machine" in done.err and len(done.err.splitlines()) == 1


@pytest.mark.processes
def test_serve_says_what_hinders_it(tmp_path: Path) -> None:
    store = "sqlite:///timeline.db?cache_mib=8"
    first = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--store", store, cwd=tmp_path)
    try:
        assert first.stdout is not None
        said = first.stdout.readline().decode()
        listen = re.search(r"127\.0\.0\.1:\d+", said)
        assert listen is not None and "cache_mib" not in said, said  # what may hold a secret is left out
        port_taken = start("serve", "--listen", listen[0], "--metrics", "off", "--store", "memory://", cwd=tmp_path)
        _, errors = port_taken.communicate(timeout=30)
        assert port_taken.returncode == 4
        assert len(errors.splitlines()) == 1, errors
        assert f"{listen[0]} is taken: the Timeline broker ".encode() in errors
        assert errors.endswith(b". A second broker also needs --http HOST:PORT for HTTP.\n")
        assert first.stderr is not None
        assert b"ready" in first.stderr.readline()
        file_taken = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", cwd=tmp_path)
        _, errors = file_taken.communicate(timeout=30)
        assert file_taken.returncode == 4
        assert b"timeline.db" in errors and b"Traceback" not in errors
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=30)
    assert first.returncode == 0


@pytest.mark.prove
@pytest.mark.processes
async def test_a_broker_whose_client_hangs_ends_without_a_traceback() -> None:
    broker = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--store", "memory://")
    assert broker.stdout is not None
    address = json.loads(broker.stdout.readline())["listen"]
    async with timeline.connect(address, timeout="10s") as tl:
        await tl.create_topic("t")
        await tl.producer("t").produce(b"", in_="1h")
        broker.send_signal(signal.SIGTERM)
        _, said = broker.communicate(timeout=30)  # the client's loop stands still: it reads nothing
    assert broker.returncode == 0 and said.endswith(b"stopped\n") and b"Traceback" not in said, said.decode()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_standard_stream_that_is_closed_is_nobody_s(number: int, tmp_path: Path) -> None:
    """The number of a closed stream would go to the next file that is opened."""
    program = (
        "import os, sys; from timeline import __main__ as main; main._main = lambda: 0; main.main();"
        "told = [os.readlink(f'/proc/self/fd/{at}') == os.devnull for at in range(3)];"
        f"print(told, file=open({str(tmp_path / 'o')!r}, 'w'));"
        "print('said'); print('said', file=sys.stderr); assert not sys.stdin or not sys.stdin.read(0)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {number}{"<" if number == 0 else ">"}&-', "sh", sys.executable, "-c", program],
        stdin=subprocess.PIPE, capture_output=True, env=plain_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o").read_text() == f"{[at == number for at in range(3)]}\n"
