"""The file of tokens: the rights of each, and the SHA-256 of its text, never the text itself.

A token is `timeline_ID_SECRET`: 12 hex digits that name it, and 256 random bits as 64 hex digits. It is found by its
id, which is no secret, and its hash is compared in constant time. A plain SHA-256 is enough. Salts and slow hashes are
for secrets that people think up; 2²⁵⁶ secrets cannot be tried.

The file is JSON, a line per token, and is replaced as a whole. A reader meets the old file or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from timeline.broker.api.access import Principal, Right
from timeline.errors import Invalid
from timeline.files import read_with_mode
from timeline.model import MAX_TIME_MS

FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024
MAX_PATTERNS = 100
MAX_NAME_BYTES = 255
MAX_TOKEN_CHARACTERS = 96
_TOKEN = re.compile(r"timeline_([0-9a-f]{12})_[0-9a-f]{64}")
_NOTHING = "0" * 64
FIELDS = ("id", "name", "sha256", "rights", "topics", "groups", "created_ms", "expires_ms")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token in the file. `expires_ms`: 0 is never."""

    id: str
    name: str
    sha256: str
    rights: tuple[str, ...]
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    created_ms: int
    expires_ms: int = 0

    def check(self) -> TokenRecord:
        """Return itself. Raise Invalid with a sentence for the first impossible field."""
        if not re.fullmatch(r"[0-9a-f]{12}", self.id) or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise Invalid("id and sha256 are 12 and 64 hex digits")
        if not self.name.isprintable() or not self.name.strip() or len(self.name.encode()) > MAX_NAME_BYTES:
            raise Invalid(f"a token's name is 1 to {MAX_NAME_BYTES} bytes of printable characters")
        known = [right.value for right in Right]
        for right in self.rights:
            if right not in known:
                raise Invalid(f"a right is one of {', '.join(known)}, not {right!r:.40}")
        if not self.rights:
            raise Invalid(f"a token has at least one right: {', '.join(known)}")
        for what, patterns in (("topic", self.topics), ("group", self.groups)):
            if len(patterns) > MAX_PATTERNS or not all(
                1 <= len(each) <= 255 and each.isprintable() for each in patterns
            ):
                raise Invalid(f"a token names up to {MAX_PATTERNS} {what}s, each of 1 to 255 printable characters")
        if not 0 <= self.created_ms <= MAX_TIME_MS or not 0 <= self.expires_ms <= MAX_TIME_MS:
            raise Invalid("created_ms and expires_ms are milliseconds since 1970, UTC")
        return self

    @property
    def bearer(self) -> Principal:
        """Its bearer as a caller."""
        rights = frozenset(map(Right, self.rights))
        return Principal(self.name, self.id, rights, self.topics, self.groups, self.expires_ms)

    def is_shown(self, token: str) -> bool:
        """Return whether `token` is this one. It takes equally long if not."""
        return hmac.compare_digest(digest(token), self.sha256)


NOBODY = TokenRecord(_NOTHING[:12], "nobody", _NOTHING, (), (), (), 0)
"""Compared with unknown tokens, so that they take as long as known ones."""


def token_of(id: str, secret: str) -> str:
    """Return the token's text. `id`: 12 hex digits, `secret`: 64."""
    return f"timeline_{id}_{secret}"


def digest(token: str) -> str:
    """Return the SHA-256 of a token's text, as hex digits."""
    return hashlib.sha256(token.encode()).hexdigest()


def id_of(token: str) -> str:
    """Return the id in a token's text. Empty: it is no token."""
    match = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    return match[1] if match else ""


def parse_tokens(text: str, file: str) -> dict[str, TokenRecord]:
    """Return the tokens in the file's text, by id. Raise Invalid naming `file`, and a bad token."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise Invalid(f"the token file {file!r} is not JSON: write it with 'timeline token create'") from bad
    if not isinstance(content, dict) or content.get("timeline_tokens") != FORMAT:
        raise Invalid(
            f'the token file {file!r} must begin with {{"timeline_tokens": {FORMAT}: this version reads no other'
        )
    listed = content.get("tokens")
    if not isinstance(listed, list):
        raise Invalid(f"the token file {file!r} has no list of tokens")
    found: dict[str, TokenRecord] = {}
    for at, each in enumerate(listed):
        try:
            entry = _entry(each)
        except Invalid as bad:
            raise Invalid(f"the token file {file!r}, token {at + 1}: {bad.reason}") from None
        if entry.id in found:
            raise Invalid(f"the token file {file!r} has the id {entry.id} twice")
        found[entry.id] = entry
    return found


def _entry(content: Any) -> TokenRecord:
    if not isinstance(content, dict) or set(content) != set(FIELDS):
        raise Invalid(f"a token has {', '.join(FIELDS)}, and nothing else")
    for name, value in content.items():
        if name in ("id", "name", "sha256"):
            if not isinstance(value, str):
                raise Invalid(f"{name} is a text")
        elif name in ("rights", "topics", "groups"):
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise Invalid(f"{name} is a list of texts")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise Invalid(f"{name} is a whole number")
    lists = {name: tuple(content[name]) for name in ("rights", "topics", "groups")}
    return TokenRecord(**(content | lists)).check()


def shown_tokens(entries: Iterable[TokenRecord]) -> str:
    """Return the file's text."""
    lines = ",\n  ".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in entries)
    return f'{{"timeline_tokens": {FORMAT}, "tokens": [\n  {lines}\n]}}\n'


def read_tokens(path: Path) -> dict[str, TokenRecord]:
    """Return the tokens in the file, by id. Raise Invalid: unreadable, not such a file, or others may write it."""
    content, mode = read_with_mode(path, "token file", MAX_BYTES)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Invalid(f"others may write the token file {str(path)!r}, and give themselves any right: chmod 600 it")
    try:
        return parse_tokens(content.decode(), str(path))
    except UnicodeDecodeError as bad:
        raise Invalid(f"the token file {str(path)!r} is not UTF-8") from bad


def change_tokens(path: Path, change: Callable[[Mapping[str, TokenRecord]], Iterable[TokenRecord]]) -> None:
    """Replace the file by what `change` makes of its tokens (none if there is no file yet), in one step, mode 0600.

    Concurrent changes take turns. Raise Invalid, also what `change` raises.
    """
    path = _meant(path)
    with _turn(path):
        tokens = read_tokens(path) if path.exists() else {}
        text = shown_tokens(change(tokens))
        with written_alone(path, text):
            pass


@contextmanager
def written_alone(path: Path, text: str) -> Iterator[None]:
    """Replace the file by `text`, readable only by its owner, when the block ends without an error. Raise Invalid."""
    path = _meant(path)
    if path.exists() and not path.is_file():
        raise Invalid(f"{str(path)!r} is no file: name one")
    fresh = path.with_name(f".{path.name}.new")
    try:
        with _refused(path):
            _write_fresh(fresh, path, text)
        yield
        with _refused(path):
            fresh.replace(path)
    except BaseException:
        with suppress(OSError):  # it was not made, or its folder is out of reach now
            fresh.unlink()
        raise


def _write_fresh(fresh: Path, path: Path, text: str) -> None:
    """Write the file that will replace `path`. It is on disk when this returns."""
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as opened:
        if path.exists() and os.geteuid() == 0:
            owner = path.stat()  # root changes it for the broker's user, who must go on reading it
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        opened.write(text)
        opened.flush()
        os.fsync(descriptor)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Raise errors of the system about the file as Invalid."""
    try:
        yield
    except OSError as cannot:
        raise Invalid(f"the file {str(path)!r} cannot be written: {cannot.strerror}") from cannot


def _meant(path: Path) -> Path:
    """Return the file itself if `path` is a link to it. A file in place of the link would be a second one, which
    readers of the first would not see."""
    return Path(os.path.realpath(path))


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Lock the file's folder against other changes."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cannot:
        raise Invalid(f"the folder of the token file {str(path)!r} cannot be opened: {cannot.strerror}") from cannot
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
