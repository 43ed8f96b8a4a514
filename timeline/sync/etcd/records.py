"""The keys that a cluster has in etcd, their values, and a snapshot of them: JSON to read with `etcdctl get --prefix`.

```
/PREFIX/cluster          {"format": 1, "cluster": "9f…", "by": "b1"}              for good
/PREFIX/brokers/b1       {"format": 1, "address": "10.0.0.7:9000", …}             with b1's lease
/PREFIX/consumers/b1/77  {"format": 1, "topic": "departures", "healthy": 3, …}  with b1's lease
/PREFIX/topics           {"format": 1, "by": "b1"}                                for good; its revision counts
```

Names of brokers are percent-encoded in keys. Unknown fields of a known format are ignored, and so are unknown keys: a
later version may add some. To give a field another meaning, it needs a new format.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from timeline.config import check_address
from timeline.errors import Invalid
from timeline.sync.etcd.client import EtcdEntry, Listing
from timeline.sync.membership import Member, MembershipRefused

FORMAT = 1
IDS_SHOWN, ID_CHARS = 50, 32
"""Consumers of a topic and broker that are named, for people, and how much of each id. Only their count matters. A
hundred such entries stay below what etcd takes at once, 1.5 MiB, whatever characters ids have."""
MOST_CONSUMERS = 1_000_000_000
"""Of one topic on one broker; the assignment calculates with it in 64 bits."""
MAX_TEXT_BYTES = 255


class Unreadable(ValueError):
    """This version cannot read a value. The message says why."""


@dataclass(frozen=True, slots=True)
class EtcdKeys:
    """The keys under a prefix."""

    prefix: str

    @property
    def every(self) -> str:
        """Return the prefix of all of them."""
        return f"/{self.prefix}/"

    @property
    def cluster(self) -> str:
        return f"/{self.prefix}/cluster"

    @property
    def topics(self) -> str:
        return f"/{self.prefix}/topics"

    def broker(self, name: str) -> str:
        return f"/{self.prefix}/brokers/{quote(name, safe='')}"

    def consumers(self, broker: str, topic_uid: int) -> str:
        return f"/{self.prefix}/consumers/{quote(broker, safe='')}/{topic_uid}"

    def broker_of(self, key: str) -> str | None:
        """Return whose entry `key` is; None for another kind of key."""
        head, _, name = key.removeprefix(self.every).partition("/")
        return unquote(name) if head == "brokers" and name and "/" not in name else None

    def consumers_of(self, key: str) -> tuple[str, int] | None:
        """Return the broker and the topic of a key of consumers; None for another kind of key."""
        parts = key.removeprefix(self.every).split("/")
        if len(parts) != 3 or parts[0] != "consumers" or re.fullmatch(r"-?[0-9]{1,20}", parts[2]) is None:
            return None
        return unquote(parts[1]), int(parts[2])


def cluster_value(cluster_uid: str, by: str) -> str:
    return _encoded({"cluster": cluster_uid, "by": by})


def broker_value(member: Member, session: str) -> str:
    """Return a broker's entry. `session`: random, of this start; by it a broker tells its entry from a namesake's."""
    return _encoded({"address": member.address, "version": member.version, "session": session})


def consumers_value(topic: str, consumers: Collection[bytes]) -> str:
    ids = sorted(id.decode(errors="replace")[:ID_CHARS] for id in consumers)
    return _encoded({"topic": topic, "healthy": len(ids), "consumers": ids[:IDS_SHOWN]})


def topics_value(by: str) -> str:
    return _encoded({"by": by})


def read_cluster(value: bytes, key: str) -> str:
    """Return the uid of the cluster's store. Raise MembershipRefused for what this version cannot read."""
    try:
        return _text(_decoded(value), "cluster")
    except Unreadable as bad:
        raise MembershipRefused(
            f"{key} in etcd is of another version of Timeline, or not Timeline's ({bad}): upgrade this broker, or give "
            "the cluster a prefix of its own in --sync"
        ) from bad


def read_broker(name: str, value: bytes) -> tuple[Member, str]:
    """Return a member and its session. Raise Unreadable."""
    fields = _decoded(value)
    address, version, session = (_text(fields, field) for field in ("address", "version", "session"))
    if address:
        try:
            check_address("address", address)
        except Invalid as bad:
            raise Unreadable(bad.reason) from None
    if not name.isprintable() or len(name.encode()) > MAX_TEXT_BYTES or len(version.encode()) > MAX_TEXT_BYTES:
        raise Unreadable(f"a broker's name and version have up to {MAX_TEXT_BYTES} printable bytes")
    return Member(name, address, version), session


def read_consumers(value: bytes) -> int:
    """Return the number of healthy consumers. Raise Unreadable."""
    healthy = _decoded(value).get("healthy")
    if not isinstance(healthy, int) or isinstance(healthy, bool) or not 0 <= healthy <= MOST_CONSUMERS:
        raise Unreadable(f"healthy is no count from 0 to {MOST_CONSUMERS}")
    return healthy


def _encoded(fields: Mapping[str, object]) -> str:
    return json.dumps({"format": FORMAT, **fields}, ensure_ascii=False)


def _decoded(value: bytes) -> Mapping[str, object]:
    try:
        fields = json.loads(value)
    except ValueError as bad:  # text that is not UTF-8 as well
        raise Unreadable("it is not JSON") from bad
    except RecursionError as deep:
        raise Unreadable("it is nested too deeply") from deep
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise Unreadable('it has no "format"')
    if fields["format"] != FORMAT:
        raise Unreadable(f"it has format {fields['format']}, and this version reads {FORMAT}")
    return fields


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Unreadable(f"{name} is no text")
    return value


log = logging.getLogger("timeline.sync")

Hosting = Mapping[int, Mapping[str, int]]
"""Healthy consumers by topic's uid and broker's name."""


@dataclass(slots=True)
class ClusterSnapshot:
    """Entries under a cluster's prefix. `revision`: etcd's at the last read. `topics_revision`: of the last announced
    change of topic records, 0 for none."""

    keys: EtcdKeys
    revision: int = 0
    topics_revision: int = 0
    entries: dict[str, EtcdEntry] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _hosting: dict[int, Mapping[str, int]] = field(default_factory=dict)
    _unreadable: set[str] = field(default_factory=set)

    def read(self, listing: Listing) -> None:
        """Replace all entries."""
        there = {entry.key: entry for entry in listing.entries}
        for key in self.entries.keys() - there.keys():
            self._drop(key)
        for key, entry in there.items():
            if self.entries.get(key) != entry:
                self._put(entry)
        self._settle(listing)

    def update(self, listing: Listing) -> bool:
        """Add what was changed since `revision`. Return False if that does not add up, because something was deleted or
        etcd is another one. Then all has to be read."""
        if listing.revision < self.revision:
            return False
        new = sum(entry.key not in self.entries for entry in listing.entries)
        if listing.count != len(self.entries) + new:
            return False
        for entry in listing.entries:
            self._put(entry)
        self._settle(listing)
        return True

    def members(self) -> Sequence[Member]:
        """Return the brokers that have an entry."""
        return list(self._members.values())

    def hosting(self) -> Hosting:
        """Return what brokers host, even those without an entry. A topic without a change keeps its mapping object, so
        that it need not be read again."""
        return dict(self._hosting)

    def _put(self, entry: EtcdEntry) -> None:
        self._drop(entry.key)
        self.entries[entry.key] = entry
        name, told = self.keys.broker_of(entry.key), self.keys.consumers_of(entry.key)
        try:
            if name is not None:
                self._members[name], _ = read_broker(name, entry.value)
            elif told is not None:
                broker, uid = told
                self._hosting[uid] = {**self._hosting.get(uid, {}), broker: read_consumers(entry.value)}
        except Unreadable as bad:
            if entry.key not in self._unreadable:
                log.warning("%.300s in etcd is left out: %s", entry.key, bad)
            self._unreadable.add(entry.key)
        else:
            self._unreadable.discard(entry.key)

    def _drop(self, key: str) -> None:
        self.entries.pop(key, None)
        name, told = self.keys.broker_of(key), self.keys.consumers_of(key)
        if name is not None:
            self._members.pop(name, None)
        elif told is not None:
            broker, uid = told
            others = {name: count for name, count in self._hosting.get(uid, {}).items() if name != broker}
            if others:
                self._hosting[uid] = others
            else:
                self._hosting.pop(uid, None)

    def _settle(self, listing: Listing) -> None:
        self.revision = listing.revision
        topics = self.entries.get(self.keys.topics)
        self.topics_revision = topics.revision if topics else 0


def with_lingering(
    members: Sequence[Member], hosting: Hosting, late: Sequence[Member], late_hosting: Hosting
) -> tuple[Sequence[Member], Hosting]:
    """Return members and what they host, and the same of those `late` that are missing among them."""
    there = {member.name for member in members}
    missing = [member for member in late if member.name not in there]
    names = {member.name for member in missing}
    merged = dict(hosting)
    for uid, counts in late_hosting.items():
        for name in names & counts.keys():
            merged[uid] = {**merged.get(uid, {}), name: counts[name]}
    return [*members, *missing], merged
