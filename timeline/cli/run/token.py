"""`timeline token`: who may do what. A file keeps hashes; brokers read it again when it changes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from timeline.broker.api.access import Right
from timeline.broker.server.tokens import (
    MAX_TOKEN_CHARACTERS,
    TokenRecord,
    change_tokens,
    digest,
    id_of,
    read_tokens,
    token_of,
    written_alone,
)
from timeline.cli.app import DONE, REFUSED, Failed, Suggesting, complain, say
from timeline.cli.options import Milliseconds, json_option
from timeline.cli.output import picked, print_json, print_table, time_cell
from timeline.clock import Clock
from timeline.driver.times import shown_time
from timeline.errors import Invalid
from timeline.wording import shown_duration

FILE_VARIABLE = "TIMELINE_TOKENS"
ROUND_MS = 86_400_000


@click.group(cls=Suggesting)
def token() -> None:
    """Create, list and revoke tokens: who may do what on brokers that serve with --tokens FILE.

    \b
    Example:
      timeline token create --tokens tokens.json --name web --right produce \\
        --topic 'orders*' --group web
      timeline token list --tokens tokens.json
      timeline token revoke web --tokens tokens.json
    """


def file_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tokens and --json."""
    tokens = click.option(
        "--tokens",
        "file",
        envvar=FILE_VARIABLE,
        required=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"File of tokens. Variable: {FILE_VARIABLE}.",
    )
    return tokens(json_option(function))


@token.command()
@click.option("--name", required=True, help="Name shown in logs. Several tokens may share it, to replace one by one.")
@click.option(
    "--right",
    "rights",
    multiple=True,
    required=True,
    type=click.Choice([right.value for right in Right]),
    help="Right that it gives; repeatable.",
)
@click.option("--topic", "topics", multiple=True, default=("*",), metavar="GLOB", help="Topics that it is for.")
@click.option(
    "--group", "groups", multiple=True, default=("*",), metavar="GLOB", help="Producer groups that it is for."
)
@click.option(
    "--into",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File to write it to, mode 0600, in place of output.",
)
@click.option("--expires", type=Milliseconds(), help="How long it is valid, such as 90d. Default: for ever.")
@file_command
def create(file: Path, as_json: bool, into: Path | None, expires: int | None, **given: Any) -> int:
    """Create a token and print it, this once.

    --tokens FILE is the file that brokers serve with. It keeps the hash of the token, and is created if missing.
    Brokers accept the token within a second.

    \b
    Rights:
      produce   produce, move, cancel, revive and purge messages of its groups
      consume   take messages, read payloads
      admin     create, change and drop topics
      operator  act on messages of any group, with --as-operator
      schedule  create, change and delete recurring schedules
      broker    calls between brokers

    \b
    Example:
      timeline token create --tokens tokens.json --name web --right produce \\
        --group web --into web.token
      timeline token create --tokens tokens.json --name worker --right consume \\
        --topic 'orders*' --expires 90d
    """
    text, entry = _created(file, into, expires, **given)
    if as_json:
        print_json(_entry_json(entry) | {"token": text if into is None else None})
    elif into is not None:
        say(f"{entry.id} ({entry.name}) is in {into}, its hash in {file}")
    else:
        say(text)
        complain(f"this is shown once; {file} keeps its hash as {entry.id} ({entry.name})")
    return DONE


def _created(
    file: Path, into: Path | None, lasts_ms: int | None, *, name: str, rights: tuple[str, ...],
    topics: tuple[str, ...], groups: tuple[str, ...],
) -> tuple[str, TokenRecord]:  # fmt: skip
    """Add a token to `file`. Return its text, and its record in the file."""
    now_ms = Clock().now_ms()
    made: list[tuple[str, TokenRecord]] = []
    placing = ExitStack()

    def add(tokens: Mapping[str, TokenRecord]) -> Iterable[TokenRecord]:
        id = secrets.token_hex(6)
        while id in tokens:
            id = secrets.token_hex(6)
        text = token_of(id, secrets.token_hex(32))
        entry = TokenRecord(
            id=id,
            name=name,
            sha256=digest(text),
            rights=_once(rights),
            topics=_once(topics),
            groups=_once(groups),
            created_ms=now_ms,
            expires_ms=now_ms + lasts_ms if lasts_ms is not None else 0,
        ).check()
        if into is not None:
            _check_place(into, file)
            # Written before brokers can read its hash: without the file there is no token. It replaces an older file
            # only afterwards, since the older token is valid until then.
            placing.enter_context(written_alone(into, f"{text}\n"))
        made.append((text, entry))
        return [*tokens.values(), entry]

    with placing:
        change_tokens(file, add)
    return made[-1]


@token.command("list")
@file_command
def listed(file: Path, as_json: bool) -> int:
    """List tokens: what each is for, not the token itself.

    \b
    Example:
      timeline token list --tokens tokens.json
    """
    entries = read_tokens(file).values()
    if as_json:
        for entry in entries:
            print_json(_entry_json(entry))
        return DONE
    now_ms = Clock().now_ms()
    columns = ("ID", "NAME", "RIGHTS", "TOPICS", "GROUPS", "CREATED", "EXPIRES")
    rows = [
        (
            entry.id, entry.name, *map(", ".join, (entry.rights, entry.topics, entry.groups)),
            time_cell(entry.created_ms), _shown_expiry(entry.expires_ms, now_ms),
        )
        for entry in entries
    ]  # fmt: skip
    print_table(columns, rows, empty=f"{file} has no tokens", spare=("CREATED",))
    return DONE


@token.command()
@click.argument("which", nargs=-1, required=True, metavar="ID|NAME…")
@file_command
def revoke(which: tuple[str, ...], file: Path, as_json: bool) -> int:
    """Revoke tokens by id, or all of a name. Within a second they are refused, and their open streams end.

    \b
    Example:
      timeline token revoke 5f0c4c2a9b1e --tokens tokens.json
      timeline token revoke web --tokens tokens.json
    """
    gone: list[TokenRecord] = []

    def remove(tokens: Mapping[str, TokenRecord]) -> Iterable[TokenRecord]:
        for each in which:
            found = [entry for entry in tokens.values() if each in (entry.id, entry.name)]
            if not found:
                names = ", ".join(sorted({entry.name for entry in tokens.values()})) or "none"
                raise Failed(REFUSED, f"there is no token {each!r} in {file}; there are: {names}")
            gone.extend(entry for entry in found if entry not in gone)
        return [entry for entry in tokens.values() if entry not in gone]

    if not file.exists():
        raise Invalid(f"there is no file {str(file)!r}")
    change_tokens(file, remove)
    for entry in gone:
        if as_json:
            print_json(_entry_json(entry))
        else:
            say(f"revoked {entry.id} ({entry.name})")
    return DONE


def _check_place(into: Path, file: Path) -> None:
    """Raise Invalid when the token would overwrite something else."""
    if os.path.realpath(into) == os.path.realpath(file):
        raise Invalid("--into and --tokens are one file: the first gets the token itself, the second hashes of all")
    if not into.is_file():
        return
    try:
        with into.open("rb") as opened:
            there = opened.read(MAX_TOKEN_CHARACTERS + 2)
    except OSError as cannot:
        raise Invalid(f"the file {str(into)!r} cannot be read: {cannot.strerror}") from cannot
    if there.strip() and not id_of(there.decode("ascii", "replace").strip()):
        raise Invalid(f"{str(into)!r} has something else than a token in it: name another file, or delete it")


def _once(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given))


def _entry_json(entry: TokenRecord) -> dict[str, Any]:
    shown = asdict(entry) | picked(entry, "created", "expires")
    return {name: value for name, value in shown.items() if name != "sha256"}


def _shown_expiry(expires_ms: int, now_ms: int) -> str:
    if not expires_ms:
        return "never"
    left_ms = expires_ms - now_ms
    if left_ms <= 0:
        return f"expired {shown_time(expires_ms)}"
    whole_ms = max(ROUND_MS, left_ms - left_ms % ROUND_MS) if left_ms >= ROUND_MS else left_ms - left_ms % 1_000
    return f"{shown_time(expires_ms - expires_ms % 1_000)} (in {shown_duration(whole_ms)})"
