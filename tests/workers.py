"""Which tests share an xdist worker, and which of these groups start first (`--dist loadscope`)."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

SERVERS = ("cassandra", "cockroachdb", "mysql", "postgresql", "redis_cluster", "redis", "s3", "etcd")
"""Kinds of server, the dearest to start first: all modules that use a kind share a worker, so it starts once."""


@functools.cache
def group_of(module: Path) -> str:
    """Return the group of a test module: "spark", the dearest kind of server that it imports, or itself.

    Modules of process tests are spread: they wait for more than a server. Only Cassandra is too slow to start twice.
    """
    source = module.read_text(encoding="utf-8")
    if re.search(r"\bspark: Any\b", source):
        return "spark"
    used = set(re.findall(r"^from tests\.servers\.(\w+) import", source, re.MULTILINE))
    shared = SERVERS[:1] if "pytest.mark.processes" in source else SERVERS
    return next((kind for kind in shared if kind in used), str(module))


class GroupScheduling(LoadScopeScheduling):
    """Keep the tests of a group on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


def arrange(items: list[pytest.Item]) -> None:
    """Put groups that take long before those that do not."""
    ranks: dict[str, int] = {}
    for item in items:
        group = group_of(item.path)
        ranks[group] = min(_rank(item, group), ranks.get(group, 99))
    items.sort(key=lambda item: ranks[group_of(item.path)])


def _rank(item: pytest.Item, group: str) -> int:
    if group == "spark":
        return 0
    if group in SERVERS:
        return 1 + SERVERS.index(group)
    return 20 if item.get_closest_marker("processes") else 21 if item.get_closest_marker("slow") else 22
