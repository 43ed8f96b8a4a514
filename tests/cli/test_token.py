"""`timeline token`: created once, listed without secrets, revoked by id or name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from timeline.broker.server.tokens import digest, id_of, read_tokens
from timeline.clock import Clock


def test_created_listed_and_revoked(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    done = call("token", "create", "--tokens", file, "--name", "web", "--right", "produce", "--topic", "orders*",
                "--topic", "orders*", "--group", "web", "--expires", "90d")  # fmt: skip
    assert done.code == 0
    token = done.out.strip()
    assert id_of(token)
    assert "shown once" in done.err and token not in done.err
    entry = read_tokens(file)[id_of(token)]
    assert entry.sha256 == digest(token)
    assert (entry.name, entry.rights, entry.topics, entry.groups) == ("web", ("produce",), ("orders*",), ("web",))
    assert 0 <= Clock().now_ms() + 90 * 86_400_000 - entry.expires_ms < 600_000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (second,) = call("token", "create", "--tokens", file, "--name", "ops", "--right", "admin", "--right", "operator",
                     "--json").json  # fmt: skip
    assert second["rights"] == ["admin", "operator"] and second["topics"] == ["*"] and second["expires"] is None
    listed = call("token", "list", "--tokens", file)
    assert listed.code == 0 and "web" in listed.out and "never" in listed.out and "(in " in listed.out
    for secret in (token.rpartition("_")[2], second["token"].rpartition("_")[2]):
        assert secret not in listed.out + file.read_text()
    assert [each["id"] for each in call("token", "list", "--tokens", file, "--json").json] == [
        id_of(token), second["id"],
    ]  # fmt: skip
    assert "sha256" not in call("token", "list", "--tokens", file, "--json").out
    assert call("token", "revoke", second["id"], "web", "--tokens", file).code == 0
    assert call("token", "list", "--tokens", file).out.strip().endswith("has no tokens")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("create", "--name", "web"), 2, "--right"),
        (("create", "--name", "web", "--right", "everything"), 2, "'produce'"),
        (("create", "--name", "", "--right", "produce"), 2, "name is 1 to 255 bytes"),
        (("create", "--name", "web", "--right", "produce", "--expires", "soon"), 2, "--expires"),
        (("create", "--name", "web", "--right", "produce", "--topic", ""), 2, "1 to 255 printable characters"),
        (("create", "--name", "web", "--right", "produce", "--topic", "a\udcff"), 2, "1 to 255 printable characters"),
        (("revoke", "nobody"), 4, "there is no token 'nobody'"),
        (("revoke",), 2, "ID|NAME"),
    ],
)
def test_mistakes_get_the_sentence_that_mends_them(
    call: Call, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    file = tmp_path / "tokens.json"
    assert call("token", "create", "--tokens", file, "--name", "first", "--right", "consume").code == 0
    before = file.read_bytes()
    done = call("token", *arguments, "--tokens", file)
    assert (done.code, says in done.err) == (code, True), done.err
    assert file.read_bytes() == before


def test_into_a_file_that_only_its_owner_may_read(call: Call, tmp_path: Path) -> None:
    file, into = tmp_path / "tokens.json", tmp_path / "web.token"
    create = ("token", "create", "--tokens", file, "--name", "web", "--right", "produce", "--into", into)
    for _ in range(2):  # the second time it is renewed
        done = call(*create)
        token = into.read_text().strip()
        assert done.code == 0 and token.rpartition("_")[2] not in done.out + done.err
        assert stat.S_IMODE(into.stat().st_mode) == 0o600
        assert read_tokens(file)[id_of(token)].sha256 == digest(token)
    assert len(read_tokens(file)) == 2
    done = call(*create[:-1], tmp_path / "no" / "folder")
    assert done.code == 2 and "cannot be written: No such file" in done.err
    assert len(read_tokens(file)) == 2, "what nobody could be given is not created"


def test_the_file_is_named_by_a_variable_too(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("token", "list").code == 2
    monkeypatch.setenv("TIMELINE_TOKENS", str(tmp_path / "tokens.json"))
    done = call("token", "list")
    assert done.code == 2 and "cannot be read" in done.err
    assert call("token", "revoke", "x").code == 2
    assert call("token", "create", "--name", "a", "--right", "consume").code == 0
    assert call("token", "list").code == 0


def test_options_of_who_we_are_are_refused_before_anything_is_asked(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("topic", "list", "--tls-ca", tmp_path / "none.pem")
    assert done.code == 2 and "cannot be read" in done.err and "--tls-ca" in done.err
    (tmp_path / "t").write_text("hunter2")
    done = call("ls", "t", "--token-file", tmp_path / "t")
    assert done.code == 2 and "this is no token" in done.err and "hunter2" not in done.err
    monkeypatch.setenv("TIMELINE_TOKEN", "hunter2")
    done = call("move", "t", "1", "--in", "1h", "--as-operator")
    assert done.code == 2 and "this is no token" in done.err and "hunter2" not in done.err


def test_a_token_that_cannot_be_made_known_does_not_take_the_place_of_one_that_is(call: Call, tmp_path: Path) -> None:
    file, into = tmp_path / "tokens.json", tmp_path / "given" / "web.token"
    into.parent.mkdir()
    create = ("token", "create", "--tokens", file, "--name", "web", "--right", "produce", "--into", into)
    assert call(*create).code == 0
    before = into.read_bytes(), file.read_bytes()
    (tmp_path / ".tokens.json.new").mkdir()  # where the new file would be written, as on a disk that is full
    done = call(*create)
    assert done.code == 2 and "cannot be written" in done.err
    assert (into.read_bytes(), file.read_bytes()) == before
    assert [path.name for path in into.parent.iterdir()] == ["web.token"]


@pytest.mark.parametrize("into", ["", ".", "folder", "link", "tokens.json", "broker.key"])
def test_a_token_takes_the_place_of_nothing_else(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "broker.key").write_text("-----BEGIN PRIVATE KEY-----\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = call("token", "create", "--tokens", "tokens.json", "--name", "web", "--right", "produce", "--into", into)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "link").is_char_device() and (tmp_path / "broker.key").read_text().startswith("-----BEGIN")


def test_what_is_revoked_by_a_link_is_revoked(call: Call, tmp_path: Path) -> None:
    file, link = tmp_path / "tokens.json", tmp_path / "link.json"
    assert call("token", "create", "--tokens", file, "--name", "web", "--right", "produce").code == 0
    link.symlink_to(file)
    assert call("token", "revoke", "web", "--tokens", link).code == 0
    assert read_tokens(file) == {} and link.is_symlink()
