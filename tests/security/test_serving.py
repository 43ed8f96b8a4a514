"""`timeline serve` as a person starts it: what it refuses, and tokens that change while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import timeline
import timeline.driver.transport.addresses as probing
from tests.cli.conftest import start
from tests.security.conftest import Papers
from timeline.cli import options as client_options
from timeline.cli.app import run
from timeline.cli.run.serve import exposure
from timeline.config import ServeConfig, load
from timeline.errors import STAYS, Forbidden, Invalid, Unknown

CERTIFIED = {"tls_cert": "c.pem", "tls_key": "c.key"}


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, ""),
        ({"listen": "localhost:9000"}, ""),
        ({"listen": "127.0.0.99:9000"}, ""),
        ({"listen": "[::1]:9000"}, ""),
        ({"listen": "0.0.0.0:9000"}, "no TLS (--tls-cert, --tls-key) and no asking who calls"),
        ({"listen": "[::]:9000"}, "no TLS"),
        ({"listen": ":9000"}, "no TLS"),
        ({"listen": "broker-1:9000"}, "no TLS"),
        ({"listen": "10.0.0.5:9000"}, "no TLS"),
        ({"listen": "0.0.0.0:9000", "insecure": True}, ""),
        ({"listen": "0.0.0.0:9000", "tokens": "t.json"}, "no TLS (--tls-cert, --tls-key). "),
        ({"listen": "0.0.0.0:9000", **CERTIFIED}, "no asking who calls (--tokens, or --client-ca). "),
        ({"listen": "0.0.0.0:9000", **CERTIFIED, "tokens": "t.json"}, ""),
        ({"listen": "0.0.0.0:9000", **CERTIFIED, "client_ca": "ca.pem"}, ""),
    ],
)
def test_beyond_this_machine_it_takes_tls_and_tokens(settings: dict[str, object], missing: str) -> None:
    said = exposure(ServeConfig(**settings).check())  # type: ignore[arg-type]
    assert missing in said
    assert bool(said) is bool(missing)
    assert not said or "--insecure" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tls_cert": "c.pem"}, "tls_cert and tls_key belong together"),
        ({"tls_key": "c.key"}, "tls_cert and tls_key belong together"),
        ({"client_ca": "ca.pem"}, "takes TLS"),
        ({"insecure": "maybe"}, "true or false is needed"),
        ({"workers": "0"}, "workers must be a whole number from 1 to 64"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, object], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        load(settings, {})


def test_the_switch_is_read_from_variables_and_files(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("insecure = true\n")
    assert load({}, {}, file).insecure
    assert load({}, {"TIMELINE_INSECURE": "yes"}).insecure
    assert not load({}, {"TIMELINE_INSECURE": "0"}, file).insecure


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A broker and its address."""
    broker = start(
        "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--store", "memory://", "--json", *arguments, cwd=folder
    )
    try:
        assert broker.stdout is not None
        line = broker.stdout.readline()
        assert line, broker.communicate()[1].decode()
        yield broker, json.loads(line)["listen"].replace("127.0.0.1", "localhost")
    finally:
        if broker.poll() is None:
            broker.send_signal(signal.SIGTERM)
        broker.communicate(timeout=60)


def told(*arguments: str, cwd: Path) -> tuple[int, str]:
    """A command's exit code, and what it said."""
    process = start(*arguments, cwd=cwd)
    out, errors = process.communicate(timeout=60)
    return process.returncode, (out + errors).decode()


@pytest.mark.processes
def test_what_cannot_be_served_so_is_refused_with_the_sentence(tmp_path: Path, papers: Papers) -> None:
    code, said = told("serve", "--listen", "0.0.0.0:0", "--store", "memory://", cwd=tmp_path)
    assert code == 4
    assert "--insecure where the network itself keeps strangers out" in said
    late = ("--tls-cert", papers.expired.cert, "--tls-key", papers.expired.key)
    code, said = told("serve", "--listen", "127.0.0.1:0", "--store", "memory://", *late, cwd=tmp_path)
    assert code == 2
    assert "expired on" in said
    assert "Traceback" not in said


@pytest.mark.processes
def test_tokens_created_and_revoked_while_it_runs(
    tmp_path: Path, papers: Papers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole way, by commands: TLS, a first token, a topic, a put, a second token for somebody else, its end."""
    for name in [name for name in os.environ if name.startswith("TIMELINE_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str) -> tuple[int, str]:
        code = run(arguments)
        said = capfd.readouterr()
        return code, said.out + said.err

    tokens, root = ("--tokens", str(tmp_path / "tokens.json")), tmp_path / "root.token"
    rights = ("--right", "admin", "--right", "produce")
    code, said = call("token", "create", *tokens, "--name", "root", *rights, "--json")
    assert code == 0
    root.write_text(json.loads(said)["token"])
    pair = ("--tls-cert", papers.broker.cert, "--tls-key", papers.broker.key)
    with serving(tmp_path, *tokens, *pair) as (broker, address):
        ask = ("--address", address, "--tls-ca", papers.ours.ca, "--timeout", "30s")
        as_root = (*ask, "--token-file", str(root))
        assert call("topic", "create", "orders", *as_root)[0] == 0
        assert call("produce", "orders", "x", "--in", "1h", "--id", "m", *as_root)[0] == 0
        code, said = call("topic", "list", *ask)
        assert (code, "FORBIDDEN" in said, "wants a token" in said) == (4, True, True)
        code, said = call("topic", "list", "--address", address, "--timeout", "1s")
        assert code == 3
        monkeypatch.setattr(probing, "PROBE_S", 20.0)
        monkeypatch.setattr(client_options, "PROBE_S", 20.0)
        code, said = call("doctor", *ask)
        assert code == 1 and "→ give one: --token-file FILE, or TIMELINE_TOKEN" in said and "cannot be had" not in said
        code, said = call("doctor", "--address", address, "--timeout", "30s")
        assert code == 1 and "→ give --tls, or --tls-ca FILE" in said and "cannot be had" not in said
        code, said = call("topic", "list", "--address", address, "--timeout", "3s")
        assert code == 3 and "speaks TLS" in said and said.endswith(f"{STAYS}\n")
        _, said = call("token", "create", *tokens, "--name", "web", "--right", "produce", "--json")
        web = json.loads(said)["token"]
        with timeline.connect_sync(address, timeout="20s", ca=papers.ours.ca, token=web) as tl:
            _until_forbidden(tl, False)
            with tl.producer("orders") as p:
                assert p.produce(b"y", in_="1h").status == "OK"
                assert call("token", "revoke", "web", *tokens)[0] == 0
                _until_forbidden(tl, True)
                with pytest.raises((Forbidden, Unknown)):  # sent before it was heard that the stream has ended
                    p.produce(b"y", in_="1h")
                with pytest.raises(Forbidden):
                    p.produce(b"y", in_="1h")
        broker.send_signal(signal.SIGTERM)
        _, logs = broker.communicate(timeout=60)
        assert broker.returncode == 0
        assert b"the tokens were read again" in logs
        assert web.rpartition("_")[2].encode() not in logs


def _until_forbidden(tl: timeline.SyncTimeline, forbidden: bool) -> None:
    """Asks until the broker has looked at its tokens again."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            tl.ping()
        except Forbidden:
            if forbidden:
                return
        else:
            if not forbidden:
                return
    pytest.fail("the broker never looked at its tokens again")
