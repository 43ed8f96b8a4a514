"""Shared words: durations and settings as people type them, others' texts as a terminal may show them, and the install
command. People type `remember` and 30d; the program counts `remember_ms`."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from functools import cache, lru_cache
from zoneinfo import available_timezones

DISTRIBUTION = "timeline-scheduler"
"""The name of the package to install. The import and the command are `timeline`."""
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))

_QUOTED = re.compile(r"(?<!\S)'[^']+'")
_JOINT = "\0"
"""Stands for a space at which no line is folded. Printable text has none."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def printable(text: str) -> str:
    """Return `text` on one line, with escapes for everything that a terminal would obey or not show. These are control
    characters, line breaks, marks of direction, characters without width, and halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_json(text: str) -> str:
    """Return the JSON `text`, of one line, with JSON's own escapes for the characters that `printable` escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def folded(line: str, width: int, indent: int) -> str:
    """Return `line` folded between words, so that it fits into `width` columns. Further lines start with `indent`
    spaces. Words in single quotes stay on one line: they are commands to copy."""
    whole = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _JOINT), line)
    lines = textwrap.wrap(whole, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_JOINT, " ")


def shown_duration(length_ms: int) -> str:
    """Return a duration for people, such as 30s or 12h. It is exact, and can be typed wherever a duration can."""
    for unit, size_ms in _UNITS:
        if length_ms and length_ms % size_ms == 0:
            return f"{length_ms // size_ms}{unit}"
    return f"{length_ms}ms" if length_ms else "0"


def shown_lateness(late_ms: float) -> str:
    """Return a length of time for people with three digits, such as 73 ms, 4.52 s, 12m 3s or 5d 2h."""
    if late_ms < 999.5:
        return f"{late_ms:.3g} ms"
    seconds = late_ms / 1000
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for large, large_s, small, small_s in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= large_s:
            return f"{whole // large_s}{large} {whole % large_s // small_s}{small}"
    return f"{whole} s"


def typed_name(setting: str) -> str:
    """Return a setting's name as it is typed: `lease_ms` is `lease`."""
    return setting.removesuffix("_ms").removesuffix("_percent")


def typed_value(setting: str, value: object) -> str:
    """Return a setting's value as it is typed: 30s, auto, 1048576."""
    if setting == "lease_ahead_ms" and value == -1:
        return "auto"
    if setting.endswith("_ms") and isinstance(value, int):
        return shown_duration(value)
    if setting.endswith("_percent") and isinstance(value, int):
        return f"{value / 100:g}"
    return str(value)


def out_of_range(setting: str, low: int, high: int, value: object) -> str:
    """Return the message for a value of `setting` that is not a whole number from `low` to `high`."""
    if not setting.endswith("_ms"):
        return f"{setting} must be a whole number from {low} to {high}, not {value!r}"
    said = typed_value(setting, value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
    auto = "auto, or " if low < 0 else ""
    return f"{typed_name(setting)} must be {auto}{shown_duration(max(0, low))} to {shown_duration(high)}, not {said}"


def above(setting: str, value: int, bound: str, most: int) -> str:
    """Return the message for a setting that is above another one, which bounds it."""
    name, limit = typed_name(setting), typed_name(bound)
    return f"{name} {typed_value(setting, value)} is above {limit} {typed_value(bound, most)}: raise {limit}, too"


def unknown_zone(name: object) -> str:
    """Return the message for a time zone that this machine does not know."""
    hint = "use a name like 'America/New_York' (if none is known, install the package tzdata)"
    return f"no time zone {name!r:.80} is known here: {nearest_zones(str(name)[:80]) or hint}"


@lru_cache(maxsize=1_024)
def nearest_zones(name: str) -> str:
    """Return `did you mean …?` for the time zones whose name, or the last part of it, is nearest to `name`; or nothing.
    Cached, as a broker may read many schedules with one such zone."""
    said = name.lower().replace(" ", "_")
    for word in (said, said.rpartition("/")[2]):
        if near := difflib.get_close_matches(word, _zones(), n=1, cutoff=0.8):
            return f"did you mean {' or '.join(map(repr, _zones()[near[0]][:3]))}?"
    return ""


@cache
def _zones() -> dict[str, list[str]]:
    """Return the time zones by their name, and by the last part of it, in small letters. Those of Etc are left out:
    Etc/GMT+1 is an hour behind UTC, which nobody means."""
    found: dict[str, list[str]] = {}
    for zone in sorted(available_timezones()):
        if zone == "UTC" or ("/" in zone and not zone.startswith("Etc/")):
            for key in {zone.lower(), zone.lower().rpartition("/")[2]}:
                found.setdefault(key, []).append(zone)
    return found


def no_such_topic(name: str) -> str:
    """Return the message for a topic that is not there."""
    return f"there is no topic {name!r}: create it first (create_topic, 'timeline topic create')"
