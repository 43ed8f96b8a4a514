"""Which tests share an xdist worker (`--dist loadgroup`), and which of these groups start first."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

SERVERS = ("cassandra", "cockroachdb", "mysql", "postgresql", "redis_cluster", "redis", "s3", "etcd")
"""Kinds of server, the dearest to start first: all `servers` tests of a kind share a worker, so it starts once."""


@functools.cache
def server_of(module: Path) -> str:
    """Return the dearest kind of server that a test module imports from `tests.servers`, or ""."""
    used = set(re.findall(r"^from tests\.servers\.(\w+) import", module.read_text(encoding="utf-8"), re.MULTILINE))
    return next((kind for kind in SERVERS if kind in used), "")


def arrange(items: list[pytest.Item]) -> None:
    """Put each test into its group, and groups that take long before those that do not. A group is all tests with
    Spark, all `servers` tests of one kind of server, or one module."""
    groups: dict[str, int] = {}
    for item in items:
        name, rank = _group(item)
        item.add_marker(pytest.mark.xdist_group(name))
        groups[name] = min(rank, groups.get(name, rank))
    items.sort(key=lambda item: groups[_group(item)[0]])


def _group(item: pytest.Item) -> tuple[str, int]:
    if "spark" in getattr(item, "fixturenames", ()):
        return "spark", 0
    kind = server_of(item.path) if item.get_closest_marker("servers") else ""
    if kind:
        return kind, 1 + SERVERS.index(kind)
    module = item.path.relative_to(item.config.rootpath).as_posix()
    return module, 20 if item.get_closest_marker("processes") else 21 if item.get_closest_marker("slow") else 22
