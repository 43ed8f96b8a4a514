"""The file of tokens: what each stands for and the SHA-256 of its text, never the text itself.

A token is `timeline_ID_SECRET`: 12 hex digits that name it, and 256 random bits as 64 hex digits. It is looked up by
its id, which is no secret, and its hash is compared in constant time. A plain SHA-256 is enough: salts and slow hashes
are for what people think up, and nobody tries 2²⁵⁶ secrets.

The file is JSON, a line a token, and is replaced as a whole: whoever reads it meets the old one or the new one.
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

from timeline.broker.api.access import Identity, Right
from timeline.errors import Invalid
from timeline.files import read_with_mode
from timeline.model import MAX_TIME_MS

FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024
MAX_PATTERNS = 100
MAX_NAME_BYTES = 255
MAX_TOKEN_CHARACTERS = 96
_TOKEN = re.compile(r"timeline_([0-9a-f]{12})_[0-9a-f]{64}")
_SECRET = re.compile(r"(timeline_[0-9a-f]{12}_)[0-9a-f]{8,}")
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
        """Itself. Raises Invalid with a sentence for the first field that cannot be meant."""
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
    def identity(self) -> Identity:
        """What its bearer may do."""
        rights = frozenset(map(Right, self.rights))
        return Identity(self.name, self.id, rights, self.topics, self.groups, self.expires_ms)

    def is_shown(self, token: str) -> bool:
        """Whether `token` is this very one; takes as long whichever it is."""
        return hmac.compare_digest(digest(token), self.sha256)


NOBODY = TokenRecord(_NOTHING[:12], "nobody", _NOTHING, (), (), (), 0)
"""What an unknown token is compared with, so that it takes as long as a known one."""


def token_of(id: str, secret: str) -> str:
    """The token's text. `id`: 12 hex digits, `secret`: 64."""
    return f"timeline_{id}_{secret}"


def digest(token: str) -> str:
    """The SHA-256 of a token's text, as hex digits."""
    return hashlib.sha256(token.encode()).hexdigest()


def id_of(token: str) -> str:
    """The id in a token's text; empty when that is no token."""
    match = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    return match[1] if match else ""


def without_secrets(text: str) -> str:
    """`text` with what would be secret in any token cut out: logs pass through here."""
    return _SECRET.sub(r"\1…", text) if "timeline_" in text else text


def parse_tokens(text: str, file: str) -> dict[str, TokenRecord]:
    """The tokens in the file's text, by id. Raises Invalid naming `file`, and the token where it is one that is bad."""
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
    for name in ("id", "name", "sha256"):
        if not isinstance(content[name], str):
            raise Invalid(f"{name} is a text")
    for name in ("rights", "topics", "groups"):
        if not isinstance(content[name], list) or not all(isinstance(each, str) for each in content[name]):
            raise Invalid(f"{name} is a list of texts")
    for name in ("created_ms", "expires_ms"):
        if not isinstance(content[name], int) or isinstance(content[name], bool):
            raise Invalid(f"{name} is a whole number")
    lists = {name: tuple(content[name]) for name in ("rights", "topics", "groups")}
    return TokenRecord(**(content | lists)).check()


def shown_tokens(entries: Iterable[TokenRecord]) -> str:
    """The file's text."""
    lines = ",\n  ".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in entries)
    return f'{{"timeline_tokens": {FORMAT}, "tokens": [\n  {lines}\n]}}\n'


def read_tokens(path: Path) -> dict[str, TokenRecord]:
    """The tokens in the file at `path`, by id. Raises Invalid: unreadable, not such a file, or others may write it."""
    content, mode = read_with_mode(path, "token file", MAX_BYTES)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Invalid(f"others may write the token file {str(path)!r}, and give themselves any right: chmod 600 it")
    try:
        return parse_tokens(content.decode(), str(path))
    except UnicodeDecodeError as bad:
        raise Invalid(f"the token file {str(path)!r} is not UTF-8") from bad


def change_tokens(path: Path, change: Callable[[Mapping[str, TokenRecord]], Iterable[TokenRecord]]) -> None:
    """Replaces the file by what `change` makes of the tokens in it (none where there is no file yet), in one step, mode
    0600; two who change it at once take turns. Raises Invalid, also what `change` raises."""
    path = _meant(path)
    with _turn(path):
        tokens = read_tokens(path) if path.exists() else {}
        text = shown_tokens(change(tokens))
        write_alone(path, text)


def write_alone(path: Path, text: str) -> None:
    """Replaces the file by one that has `text` and that only its owner may read, in one step. Raises Invalid."""
    with written_alone(path, text):
        pass


@contextmanager
def written_alone(path: Path, text: str) -> Iterator[None]:
    """The same, but that the new file takes the old one's place once the block has ended without an error."""
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
    """Writes what will stand in for `path`, on disk when it returns."""
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
    """What the system says of the file, as Invalid."""
    try:
        yield
    except OSError as cannot:
        raise Invalid(f"the file {str(path)!r} cannot be written: {cannot.strerror}") from cannot


def _meant(path: Path) -> Path:
    """The file itself, where `path` is a link to it: in place of the link there would be a second file, and whoever
    reads the first would not hear of it."""
    return Path(os.path.realpath(path))


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Alone with the file's folder, among those who ask."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cannot:
        raise Invalid(f"the folder of the token file {str(path)!r} cannot be opened: {cannot.strerror}") from cannot
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
