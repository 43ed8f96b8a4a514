"""Passwords in URLs: warned of on a command line, read from a file or the environment, and shown nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call, plain_environment, start
from timeline.config import ServeConfig, has_password, load
from timeline.errors import Invalid

SECRET = "hunter2"
URL = f"redis://timeline:{SECRET}@127.0.0.1:1/0"
SAID = "others on this machine can read the password in"
COMMANDS = [
    ["serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--sync", "local://", "--name", "", "--store"],
    ["check-store"],
    ["store", "migrate"],
    ["copy", "sqlite:///none.db", "--topic", "t"],
    ["outbox", "list"],
    ["outbox", "relay", "--once"],
    ["bench", "cycle", "--messages", "10", "--store"],
    ["bench", "cluster", "--messages", "10", "--store"],
]
"""Each is refused, or finds nobody at the URL that is put behind it."""


@pytest.mark.processes
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_a_password_on_a_command_line_is_warned_of(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if command[0] == "serve":
        command = ["serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:99999", "--store"]
    done = call(*command, URL)
    assert done.code != 0 and SAID in done.err and "@FILE" in done.err
    assert SECRET not in done.out + done.err
    (tmp_path / "url").write_text(f"{URL}\n")
    quiet = call(*command, "@url")
    assert (quiet.code, SAID in quiet.err) == (done.code, False)
    assert quiet.err.splitlines() == done.err.splitlines()[1:]


@pytest.mark.processes
def test_serve_takes_its_store_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text(f"{URL}\n")
    for flags, variable in ((("--store", "@url"), ""), ((), "@url"), ((), URL)):
        if variable:
            monkeypatch.setattr("tests.cli.conftest.plain_environment", lambda v=variable: environment(v))
        serving = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", *flags, cwd=tmp_path)
        assert serving.stdout is not None
        told = json.loads(serving.stdout.readline())
        command_line = Path(f"/proc/{serving.pid}/cmdline").read_bytes().decode()
        serving.terminate()
        _, errors = serving.communicate(timeout=30)
        assert (told["store"], told["store_open"]) == ("redis://…@127.0.0.1:1/0", False)
        assert SECRET not in command_line + errors.decode() and SAID not in errors.decode()


def environment(store: str) -> dict[str, str]:
    return plain_environment() | {"TIMELINE_STORE": store}


def test_the_file_of_a_url_has_one_line(tmp_path: Path) -> None:
    file = tmp_path / "url"
    for content in ("", "\n", "a://b\nc://d\n", "@other\n", f"{SECRET}\n"):
        file.write_text(content)
        with pytest.raises(Invalid, match=r"--store: the file .* must have one line, a URL") as refused:
            load({"store": f"@{file}"}, {})
        assert SECRET not in str(refused.value)
    with pytest.raises(Invalid, match=r"TIMELINE_SYNC: the file with a URL .* cannot be read"):
        load({}, {"TIMELINE_SYNC": f"@{tmp_path}/none"})
    file.write_bytes(b"\xef\xbb\xbfmemory://\r\n")  # as editors of Windows write it
    (tmp_path / "serve.toml").write_text(f'store = "@{file}"\n')
    assert load({}, {}, tmp_path / "serve.toml").store == "memory://"


def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    for mistyped in (f"redis:/u:{SECRET}@h/0", f"u:{SECRET}@h", f"redis:u:{SECRET}@h?password={SECRET}"):
        with pytest.raises(Invalid) as refused:
            ServeConfig(store=mistyped).check()
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "holds"),
    [
        (URL, True),
        ("postgresql://u:p%40w@h1:5432,h2/db", True),
        ("sqlite:///t.db?payloads=s3%3A%2F%2Fkey%3Asecret%40bucket%2Fx", True),
        ("sqlite:///t.db?payloads=s3://key:secret@bucket/x", True),
        ("postgresql://u@h/db?sslpassword=x", True),
        ("etcd://root:pw@e1:2379,e2:2379/timeline", True),
        ("postgresql://u@h:5432,h2:5432/db", False),
        ("redis://127.0.0.1:6379/0", False),
        ("sqlite:///a:b@c.db", False),
        ("mysql://u@h/db?timeout_ms=5", False),
    ],
)
def test_which_urls_hold_a_password(url: str, holds: bool) -> None:
    assert has_password(url) is holds
