"""Crontabs: their lines as entries with a rule, a zone, a command and a name, and what cannot be taken from them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from zoneinfo import ZoneInfo

from timeline.errors import Invalid
from timeline.recurrence import Recurrence

MAX_NAME_CHARS = 60
"""A schedule may have a longer name. This leaves room for a number behind it, and fits into a table."""
ZONES = "zoneinfo/"
_SETTING = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s=]+))\s*=\s*(.*?)\s*""")
_FIELDS = re.compile(r"\s*((?:\S+\s+){4}\S+)(?:\s+(.*))?")
_NICKNAME = re.compile(r"\s*(@\S+)(?:\s+(.*))?")
_USER = re.compile(r"([a-z_][a-z0-9_-]*\$?)\s+(\S.*)")
_NAME_CHARS = re.compile(r"[^A-Za-z0-9._-]+")
_REDIRECTION = re.compile(r"&>>?\s*\S+|[0-9]?[<>]+\s*&?\s*\S+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*")
_SEPARATOR = re.compile(r"&&|\|\||[;|]")
_SCRIPT = re.compile(r"\.(?:sh|bash|zsh|py|pl|rb|php|js|jar|ts)$")
_WRAPPERS = {
    "env", "nice", "ionice", "flock", "timeout", "sudo", "nohup", "time", "exec", "setsid", "chronic", "cronic",
}  # fmt: skip
"""Programs that run the one that is named after them."""
_INTERPRETERS = re.compile(r"(?:python|perl|ruby|php|node|java|bash|sh|dash|zsh|ksh)[0-9.]*")
_INLINE = re.compile(r"(?:\S*/)?(?:perl|python[0-9.]*|ruby|php) -(?:e|c|r)\b")
_PREPARATIONS = {"cd", "test", "[", "[[", "source", ".", "export", "umask", "set", "sleep", "command"}
"""Commands that only prepare the one after them."""
_MINUTE_MS = 60_000


class CrontabStyle(StrEnum):
    """Whether the word after the five fields is the user who runs the command, as in /etc/crontab."""

    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class CrontabEntry:
    """A line that a schedule can stand for. `command`: what the shell gets. `stdin`: its standard input, None without
    one. `user`: who runs it, empty in a user's crontab. `base`: a name for it."""

    line: int
    cron: str
    zone: str
    command: str
    stdin: str | None = None
    user: str = ""
    jitter_ms: int = 0
    base: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its occurrences."""
        headers = {"user": self.user} if self.user else {}
        return headers if self.stdin is None else headers | {"stdin": self.stdin}


@dataclass(frozen=True, slots=True)
class CrontabNote:
    """A sentence about a line. `refused`: no schedule stands for the line, though it runs something."""

    line: int
    text: str
    refused: bool = False


@dataclass(slots=True)
class Crontab:
    """What a crontab has."""

    style: CrontabStyle
    entries: list[CrontabEntry] = field(default_factory=list)
    notes: list[CrontabNote] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """How many lines run something and have no entry."""
        return sum(note.refused for note in self.notes)


def read_crontab(text: str, zone: str, style: CrontabStyle | None = None, users: Collection[str] = ()) -> Crontab:
    """Return the entries of a crontab. `zone`: that of its times, unless it sets CRON_TZ. `style`: None finds out by
    `users`, the names of this machine's users."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    lines = [(number, line) for number, line in lines if not line.lstrip().startswith("#")]
    usual = zone
    read = Crontab(style or _style_of([line for _, line in lines], users))
    jitter_ms = 0
    for number, line in lines:
        setting = _SETTING.fullmatch(line)
        if setting is None:
            try:
                read.entries.append(_entry(number, line, zone, jitter_ms, read.style))
            except Invalid as bad:
                read.notes.append(CrontabNote(number, bad.reason, refused=True))
            continue
        name, value = setting[1] or setting[2] or setting[3] or "", _unquoted(setting[4])
        if name == "CRON_TZ":
            zone = value or usual
        elif name == "RANDOM_DELAY" and value.isascii() and value.isdigit() and len(value) <= 6:
            jitter_ms = int(value) * _MINUTE_MS
        else:
            read.notes.append(CrontabNote(number, _not_taken(name, value)))
    return read


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def _not_taken(name: str, value: str) -> str:
    if name == "TZ":
        return f"TZ={value:.40} counts for commands alone, not for times: give --zone if your cron takes it for times"
    if name == "MAILTO":
        return "MAILTO is left out: nobody mails what commands print. The consumer that runs them can"
    return f"{name:.40}={value:.40} is left out: set it where the commands run"


def _style_of(lines: Sequence[str], users: Collection[str]) -> CrontabStyle:
    """Return the style of a crontab: of the system, if a user stands before each command."""
    rests = [rest for line in lines if _SETTING.fullmatch(line) is None and (rest := _split(line)[1])]
    named = [match[1] in users for rest in rests if (match := _USER.fullmatch(rest))]
    return CrontabStyle.SYSTEM if rests and len(named) == len(rests) and all(named) else CrontabStyle.USER


def _split(line: str) -> tuple[str, str]:
    """Return the rule of a line, and what stands after it. Both are empty if it has no rule."""
    match = (_NICKNAME if line.lstrip().startswith("@") else _FIELDS).fullmatch(line)
    return ("", "") if match is None else (match[1].removeprefix("-"), (match[2] or "").strip())


def _entry(number: int, line: str, zone: str, jitter_ms: int, style: CrontabStyle) -> CrontabEntry:
    """Return the entry of a line. Raise Invalid if there can be none."""
    rule, rest = _split(line)
    if not rule:
        raise Invalid("this is no line of a crontab: five fields and a command, @daily and a command, or NAME=value")
    if not line.isprintable() and not line.replace("\t", " ").isprintable():
        raise Invalid("the line has characters that no terminal shows: remove them")
    user = ""
    if style is CrontabStyle.SYSTEM:
        match = _USER.fullmatch(rest)
        if match is None:
            raise Invalid("a system's crontab has a user before the command: give --style user if this one has none")
        user, rest = match[1], match[2]
    if not rest:
        raise Invalid("there is no command after the rule")
    rule = " ".join(rule.split())
    _check_rule(rule, zone)
    command, stdin = _command(rest)
    return CrontabEntry(number, rule, zone, command, stdin, user, jitter_ms, base_name(command))


def _check_rule(rule: str, zone: str) -> None:
    if rule.lower() == "@reboot":
        raise Invalid("@reboot is no time. Leave the line in the crontab, or start the command by a systemd unit")
    if "~" in rule:
        raise Invalid(
            f"a random field like that of {rule!r:.60} is drawn again by each cron: choose a time, and --jitter"
        )
    if re.search(r"(?<![A-Za-z])H(?![A-Za-z])", rule) and not rule.startswith("@"):
        raise Invalid(f"H in {rule!r:.60} is Jenkins' own: choose a time")
    if rule.startswith("@") and rule[1:].isdigit():
        raise Invalid(f"{rule:.40} is a period: 'timeline schedule create TOPIC NAME --every {rule[1:]:.20}s'")
    Recurrence(cron=(rule,), zone=zone)


def _command(rest: str) -> tuple[str, str | None]:
    """Return what the shell gets, and standard input. The first `%` without a backslash begins it, and each further one
    is the end of a line. As cron does, end the last line, too."""
    parts = re.split(r"(?<!\\)%", rest)
    command, *given = (part.replace(r"\%", "%") for part in parts)
    stdin = "\n".join(given)
    return command.strip(), (stdin + "\n" * (stdin != "" and not stdin.endswith("\n")) if given else None)


def base_name(command: str) -> str:
    """Return a name for a command: its program, and the first word that says what the program does.

    >>> base_name("cd /srv && ./manage.py clearsessions >/dev/null 2>&1")
    'manage-clearsessions'
    """
    said = _named(_program_words(command))
    name = _NAME_CHARS.sub("-", said)[:MAX_NAME_CHARS].strip("-.")
    return name or "command"


def _program_words(command: str) -> list[str]:
    """Return the words of the program that a command runs, without what prepares it."""
    last: list[str] = []
    for part in _SEPARATOR.split(_REDIRECTION.sub(" ", command)):
        words = [word.strip("\"'()`{}") for word in part.split()]
        words = [word for word in words if word]
        while words and _ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        if words and PurePosixPath(words[0]).name in _WRAPPERS:
            words = _unwrapped(words)
        last = words or last
        if words and words[0] not in _PREPARATIONS and not _INLINE.match(" ".join(words)):
            return words
    return last


def _unwrapped(words: list[str]) -> list[str]:
    """Return the words from the program on that wrappers like `nice -n 10` run. Options of wrappers may have a value:
    a number, a file of a lock, a user."""
    rest = list(words)
    while rest and PurePosixPath(rest[0]).name in _WRAPPERS:
        wrapper = PurePosixPath(rest.pop(0)).name
        while rest and (rest[0].startswith("-") or _ASSIGNMENT.fullmatch(rest[0])):
            valued = rest.pop(0) in ("-n", "-c", "-u", "-g", "-w", "-E", "-k", "-s") and len(rest) > 1
            if valued and not rest[0].startswith(("-", "/")):
                del rest[0]
        if wrapper in ("flock", "timeout") and len(rest) > 1:  # the file, the time
            del rest[0]
        while rest and rest[0].startswith("-"):  # flock takes options after its file
            del rest[0]
    return rest or words


def _named(words: list[str]) -> str:
    """Return the program of `words`, and the first of its arguments that is no option."""
    if not words:
        return ""
    program, *arguments = words
    if _INTERPRETERS.fullmatch(PurePosixPath(program).name) and arguments:
        scripts = [word for word in arguments if not word.startswith("-")]
        if scripts:
            program, arguments = scripts[0], arguments[arguments.index(scripts[0]) + 1 :]
    program = _SCRIPT.sub("", PurePosixPath(program).name)
    for word in arguments:
        last = _SCRIPT.sub("", PurePosixPath(word).name)
        if not word.startswith("-") and re.fullmatch(r"[A-Za-z][\w.:-]{0,30}", last):
            return f"{program}-{last}"
    return program


def named_entries(entries: Sequence[CrontabEntry], taken: Collection[str] = ()) -> Iterator[tuple[str, CrontabEntry]]:
    """Yield entries with names of their own. A name that is `taken`, or that an entry before has, gets a number."""
    used = set(taken)
    reached: dict[str, int] = {}
    for entry in entries:
        name, many = entry.base, reached.get(entry.base, 1)
        while name in used:
            many += 1
            name = f"{entry.base}-{many}"
        used.add(name)
        reached[entry.base] = many
        yield name, replace(entry, base=name)


def machine_zone(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Return the name of this machine's time zone, which its cron uses. Raise Invalid if it cannot be found out."""
    for found in _zones_named(environ, root):
        try:
            ZoneInfo(found)
        except (KeyError, ValueError, OSError):
            continue
        return found
    if not (root / "etc/localtime").exists():
        return "UTC"  # what the C library takes then
    raise Invalid("this machine does not say the name of its time zone: give --zone, such as --zone Europe/Berlin")


def _zones_named(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    if said := environ.get("TZ", "").removeprefix(":"):
        yield said.rpartition(ZONES)[2]
    link = root / "etc/localtime"
    if link.is_symlink():
        yield str(link.readlink()).rpartition(ZONES)[2]
    try:
        yield (root / "etc/timezone").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
