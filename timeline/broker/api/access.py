"""Rights: a caller's identity, and the table of what it may do. Pure: no file, no clock, no network.

    metadata of a call ─▶ gatekeeper ─▶ Principal ─▶ gateway: `caller.refusal(deed, topic)`, per call or frame

A refusal is a sentence, empty where there is none. It is decided before anybody looks whether the topic or the message
exists, so that no refusal tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from timeline.schedules.specification import INTERNAL_PREFIX

KNOWN_MOST = 1_000
"""Most answers that an identity remembers. Names come from callers, so there is a bound."""
SHOWN_MOST = 5


class Right(StrEnum):
    """A right of a token."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"
    OPERATOR = "operator"
    SCHEDULE = "schedule"
    BROKER = "broker"


class Deed(StrEnum):
    """A kind of call, in the words of a refusal."""

    PUT = "put messages"
    CHANGE = "change messages of its groups"
    CHANGE_ANY = "change messages of every group, as an operator"
    CONSUME = "consume"
    SEE = "see what is there"
    READ = "read payloads"
    GOVERN = "create, change or drop the topic"
    SCHEDULE = "manage schedules"
    PEER = "ask what brokers ask each other"


RIGHTS: dict[Deed, frozenset[Right]] = {
    Deed.PUT: frozenset({Right.PRODUCE}),
    Deed.CHANGE: frozenset({Right.PRODUCE}),
    Deed.CHANGE_ANY: frozenset({Right.OPERATOR}),
    Deed.CONSUME: frozenset({Right.CONSUME}),
    Deed.SEE: frozenset({Right.PRODUCE, Right.CONSUME, Right.ADMIN, Right.OPERATOR, Right.SCHEDULE}),
    Deed.READ: frozenset({Right.CONSUME, Right.OPERATOR}),
    Deed.GOVERN: frozenset({Right.ADMIN}),
    Deed.SCHEDULE: frozenset({Right.SCHEDULE}),
    Deed.PEER: frozenset({Right.BROKER}),
}
"""Any one of them permits the deed."""

METHODS_OF_CLIENTS = frozenset(
    {
        "Produce",
        "Put",
        "Mutate",
        "Consume",
        "Take",
        "Settle",
        "Scan",
        "Forecast",
        "Topics",
        "Late",
        "Stand",
        "Ping",
        "Schedules",
    }
)
"""Any token may call them; its rights are then judged by deed. All other methods are between brokers."""


@dataclass(frozen=True)
class Principal:
    """A caller: the bearer of one token.

    - `topics`, `groups`: names or globs with `*`, `?` or `[ab]`.
    - `expires_ms`: 0 is never.
    - `open`: no authentication; everybody may do everything.
    - `as_operator`: it acts on messages of any group.
    """

    name: str
    token: str = ""
    """The id of the token; no secret."""
    rights: frozenset[Right] = frozenset(Right)
    topics: tuple[str, ...] = ("*",)
    groups: tuple[str, ...] = ("*",)
    expires_ms: int = 0
    open: bool = False
    as_operator: bool = field(default=False, compare=False)
    _known: dict[tuple[str, str, str | None], str] = field(default_factory=dict, compare=False, repr=False)

    def refusal(self, deed: Deed, topic: str, group: str | None = None) -> str:
        """Return why it may not do `deed` on `topic` (in the name of `group`). Empty: it may."""
        if topic.startswith(INTERNAL_PREFIX) and (why := self._kept_off(deed, topic)):
            return why
        if self.open:
            return ""
        asked = (deed.name, topic, group)
        known = self._known.get(asked)
        if known is None:
            if len(self._known) >= KNOWN_MOST:
                self._known.clear()
            known = self._known[asked] = self._judge(deed, topic, group)
        return known

    def _judge(self, deed: Deed, topic: str, group: str | None) -> str:
        needs = RIGHTS[deed]
        if not needs & self.rights:
            return (
                f"{self!s} may not {deed}: it needs the right {' or '.join(sorted(needs))}, "
                f"and has {_or(sorted(self.rights))}"
            )
        if not _matches(topic, self.topics):
            return f"{self!s} may not {deed} on topic {topic!r:.80}: its topics are {_or(self.topics)}"
        if group is not None and not _matches(group, self.groups):
            return (
                f"{self!s} may not {deed} for group {group!r:.80}: its groups are {_or(self.groups)} "
                "(group=…, --group NAME)"
            )
        return ""

    def _kept_off(self, deed: Deed, topic: str) -> str:
        """Return why it may not do `deed` on an internal topic. Brokers write these, and operators may look."""
        if deed not in (Deed.SEE, Deed.READ):
            return f"topic {topic!r:.80} is internal: only brokers change what is in it"
        if not self.open and Right.OPERATOR not in self.rights:
            return (
                f"{self!s} may not {deed} on internal topic {topic!r:.80}: it needs the right operator, "
                f"and has {_or(sorted(self.rights))}"
            )
        return ""

    def change_refusal(self, topic: str, group: str) -> str:
        """Return why it may not move, cancel, revive or purge messages of `group` (`as_operator`: of any group)."""
        if self.as_operator:
            return self.refusal(Deed.CHANGE_ANY, topic)
        refused = self.refusal(Deed.CHANGE, topic, group)
        if refused and not self.refusal(Deed.CHANGE_ANY, topic):
            return f"{refused}. As an operator it may: add --as-operator, or connect(…, as_operator=True)"
        return refused

    def sees(self, topic: str) -> bool:
        """Return whether it may know that there is such a topic."""
        return not self.refusal(Deed.SEE, topic)

    def lists(self, topic: str, asked: str) -> bool:
        """Return whether a list has the topic for it. `asked`: the name it gave. Internal topics are listed for those
        who ask by a name that begins as theirs do."""
        return self.sees(topic) and (asked.startswith(INTERNAL_PREFIX) or not topic.startswith(INTERNAL_PREFIX))

    def call_refusal(self, method: str) -> str:
        """Return why it may not call `method` at all."""
        if self.as_operator and not self.open and Right.OPERATOR not in self.rights:
            return f"{self!s} has not the right operator, which --as-operator needs"
        if method in METHODS_OF_CLIENTS or self.open or Right.BROKER in self.rights:
            return ""
        return f"{self!s} may not {Deed.PEER}: it needs the right {Right.BROKER}"

    def __str__(self) -> str:
        return f"token {self.name!r}"


ANYBODY = Principal("anybody", open=True)
"""The caller where no tokens are asked for."""


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _or(names: Iterable[str]) -> str:
    listed = [str(name) for name in names]
    more = " …" if len(listed) > SHOWN_MOST else ""
    return (", ".join(listed[:SHOWN_MOST]) or "none") + more
