"""The other brokers, for whoever reads the log: who came, who went, and how many buckets changed hands by it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from timeline.model import Topic
from timeline.sync import Membership
from timeline.sync.assignment import assign

Hosting = Mapping[int, Mapping[str, int]]
"""Healthy consumers by topic's uid and broker's name."""

log = logging.getLogger("timeline.broker")


class MembershipLog:
    """Tells the log once of each change of who is there. What consumers that come and go make of the buckets is no such
    change, and not told."""

    def __init__(self, membership: Membership, name: str) -> None:
        self._membership, self._name = membership, name
        self._there: set[str] | None = None
        self._hosting: dict[int, Mapping[str, int]] = {}

    def look(self, topics: Collection[Topic]) -> bool:
        """What has changed since the last look, told; the first one only learns who is there. Return whether a broker
        is gone."""
        there = {member.name for member in self._membership.members()} - {self._name}
        hosting = {topic.uid: self._membership.hosting(topic.uid) for topic in topics}
        before, self._there = self._there, there
        hosted, self._hosting = self._hosting, hosting
        if before is None or there == before:
            return False
        moved, ours = self._moved(topics, hosted, hosting)
        said = f"{moved:,} bucket{'' if moved == 1 else 's'} changed hands, {ours:,} of them to this broker"
        for names, became, level in ((before - there, "gone", logging.WARNING), (there - before, "here", logging.INFO)):
            if names:
                who = f"broker{'' if len(names) == 1 else 's'} {', '.join(sorted(names))}"
                log.log(level, "%s %s %s: %s", who, "is" if len(names) == 1 else "are", became, said)
        return not before <= there

    def _moved(self, topics: Collection[Topic], hosted: Hosting, hosting: Hosting) -> tuple[int, int]:
        """How many buckets are dealt by another broker than before, and how many of them by this one."""
        moved = ours = 0
        for topic in topics:
            was, now = hosted.get(topic.uid, {}), hosting[topic.uid]
            if was == now:
                continue
            many = topic.settings.buckets
            before, after = assign(topic.uid, many, was), assign(topic.uid, many, now)
            changed = [after.owner(bucket) for bucket in range(many) if before.owner(bucket) != after.owner(bucket)]
            moved += len(changed)
            ours += changed.count(self._name)
        return moved, ours
