"""What was probably meant by a word that is no command or option here: misspelt, or another program's word for it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

OPTIONS = {
    "--after": ("--in",),
    "--bind": ("--listen",),
    "--broker": ("--address",),
    "--brokers": ("--address",),
    "--cmd": ("--exec",),
    "--command": ("--exec",),
    "--concurrency": ("--credit",),
    "--database": ("--store",),
    "--date": ("--at", "--to"),
    "--db": ("--store",),
    "--deadline": ("--expires", "--timeout"),
    "--delay": ("--in", "--release"),
    "--due": ("--at", "--to", "--due-to"),
    "--endpoint": ("--address", "--listen"),
    "--eta": ("--at", "--to"),
    "--for": ("--wait", "--in"),
    "--force": ("--yes", "--leased"),
    "--format": ("--json", "--log-format"),
    "--from": ("--due-from", "--since"),
    "--host": ("--listen", "--address"),
    "--interval": ("--every", "--step"),
    "--key": ("--id",),
    "--label": ("--tag",),
    "--live": ("--follow",),
    "--max": ("--limit", "--count"),
    "--max-retries": ("--max-deliveries",),
    "--message-id": ("--id",),
    "--name": ("--id",),
    "--number": ("--count", "--limit"),
    "--output": ("--json",),
    "--owner": ("--group",),
    "--path": ("--store",),
    "--period": ("--window", "--every"),
    "--port": ("--listen", "--address"),
    "--prefetch": ("--credit",),
    "--retention": ("--dead-retention", "--remember"),
    "--retries": ("--max-deliveries",),
    "--run": ("--exec",),
    "--server": ("--address", "--listen"),
    "--status": ("--state",),
    "--stdin": ("--lines",),
    "--tail": ("--follow",),
    "--time": ("--at", "--to"),
    "--timezone": ("--tz",),
    "--ttl": ("--expires", "--remember", "--lease"),
    "--until": ("--due-to", "--to"),
    "--url": ("--address", "--store"),
    "--visibility-timeout": ("--lease",),
    "--wait": ("--in", "--timeout"),
    "--watch": ("--follow",),
    "--when": ("--at", "--to"),
    "--workers": ("--credit",),
    "--zone": ("--tz",),
    "-n": ("--count", "--limit"),
    "-f": ("--follow",),
    "-v": ("--version",),
    "-V": ("--version",),
}
"""Option of another program → those that mean it here, the likeliest first; a command has one of them, or none."""

COMMANDS = {
    "add": ("produce", "create"),
    "broker": ("serve",),
    "check": ("doctor",),
    "delay": ("move",),
    "delete": ("cancel", "drop", "purge"),
    "enqueue": ("produce",),
    "get": ("show",),
    "health": ("doctor",),
    "help": ("--help",),
    "info": ("show",),
    "lag": ("late",),
    "listen": ("consume",),
    "messages": ("ls",),
    "migrate": ("store", "copy"),
    "monitor": ("top",),
    "new": ("create",),
    "ping": ("doctor",),
    "postpone": ("move",),
    "pub": ("produce",),
    "publish": ("produce",),
    "put": ("produce",),
    "queue": ("topic",),
    "queues": ("topic",),
    "receive": ("consume",),
    "remove": ("cancel", "drop", "purge"),
    "reschedule": ("move",),
    "resurrect": ("revive",),
    "retry": ("revive",),
    "rm": ("cancel", "drop", "purge"),
    "run": ("serve",),
    "schedule": ("produce",),
    "search": ("ls",),
    "send": ("produce",),
    "server": ("serve",),
    "set": ("update",),
    "start": ("serve",),
    "stats": ("top",),
    "status": ("doctor",),
    "stop": ("pause",),
    "sub": ("consume",),
    "subscribe": ("consume",),
    "take": ("consume",),
    "unpause": ("resume",),
    "watch": ("top",),
    "worker": ("consume",),
}
"""The same of commands."""

_ONLY_KIND = "'timeline' is the only kind of topic there is"
_PAUSE = "'timeline topic pause NAME' pauses a topic that is there, 'topic resume' ends it"
INSTEAD = {
    "timeline topic create": {"--kind": _ONLY_KIND, "--paused": _PAUSE},
    "timeline topic update": {
        "--buckets": "a topic's buckets are fixed when it is created: 'timeline topic create NAME --buckets N'",
        "--kind": f"a topic's kind is fixed when it is created, and {_ONLY_KIND}",
        "--paused": _PAUSE,
    },
}
"""Command → option that one may expect of it, and what there is instead: no other option of it would do."""


def instead(command: str, option: str) -> str:
    """The sentence on an option that `command` does not have for a reason, or nothing."""
    said = INSTEAD.get(command, {}).get(option, "")
    return f" {said[0].upper()}{said[1:]}" if said else ""


def nearest(word: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """` Did you mean …?` for the nearest of `known`, or nothing."""
    near = _close(word, known, cutoff)
    return f" Did you mean {near}?" if near else ""


def _close(word: str, known: Sequence[str], cutoff: float) -> str | None:
    """The nearest of `known`, their leading hyphens apart: those alone would make any two options alike."""
    bare = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=cutoff)
    return bare[near[0]] if near else None


def likeliest(word: str, known: Sequence[str], elsewhere: dict[str, tuple[str, ...]], cutoff: float = 0.5) -> str:
    """The same, with another program's word for it, unless `word` is all but one of ours."""
    others: Collection[str] = elsewhere.get(word, ())
    meant = next((one for one in others if one in known), None)
    if meant is None or _close(word, known, 0.9):
        return nearest(word, known, cutoff)
    return f" Did you mean {meant}?"
