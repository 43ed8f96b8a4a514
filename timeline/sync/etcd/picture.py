"""What etcd holds of a cluster, as one broker has last read it. Pure: it is told listings, and asked what they mean."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from timeline.sync.etcd.client import Entry, Listing
from timeline.sync.etcd.records import Keys, Unreadable, read_broker, read_consumers
from timeline.sync.membership import Member

log = logging.getLogger("timeline.sync")

Hosting = Mapping[int, Mapping[str, int]]
"""Healthy consumers by topic's uid and broker's name."""


@dataclass(slots=True)
class Picture:
    """Entries under a cluster's prefix. `revision`: etcd's when it was read last; `topics_revision`: of the last change
    of topic records that was told, 0 for none."""

    keys: Keys
    revision: int = 0
    topics_revision: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _hosting: dict[int, Mapping[str, int]] = field(default_factory=dict)
    _unreadable: set[str] = field(default_factory=set)

    def read(self, listing: Listing) -> None:
        """All there is, in place of what was."""
        there = {entry.key: entry for entry in listing.entries}
        for key in self.entries.keys() - there.keys():
            self._drop(key)
        for key, entry in there.items():
            if self.entries.get(key) != entry:
                self._put(entry)
        self._settle(listing)

    def update(self, listing: Listing) -> bool:
        """What was changed since `revision`. False when that does not add up, as something was deleted, or etcd is
        another one than it was: then all has to be read."""
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
        """The brokers that have an entry."""
        return list(self._members.values())

    def hosting(self) -> Hosting:
        """What brokers say that they host; of those, too, that have no entry. What is the same as before is the same
        mapping, so that nobody has to look into it again."""
        return dict(self._hosting)

    def _put(self, entry: Entry) -> None:
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
    """Members and what they host, and of those `late` who are not among them the same."""
    there = {member.name for member in members}
    missing = [member for member in late if member.name not in there]
    names = {member.name for member in missing}
    merged = dict(hosting)
    for uid, counts in late_hosting.items():
        for name in names & counts.keys():
            merged[uid] = {**merged.get(uid, {}), name: counts[name]}
    return [*members, *missing], merged
