"""Brokers of a cluster for tests: memberships that joined, what they called back, and a process of its own for one that
is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from timeline.sync import Member, MembershipChange
from timeline.sync.conformance import Broker
from timeline.sync.etcd import EtcdMembership
from timeline.sync.etcd.membership import EtcdTiming

CLUSTER = "9f" * 16


class Watched(Broker):
    """A broker that also keeps who it believed in after each change."""

    def __init__(self, url: str, name: str, host: str = "") -> None:
        membership = EtcdMembership(url, EtcdTiming(refused=0.5))
        at = (host or name).replace("/", "-")
        super().__init__(membership, Member(name, f"{at}.example:9000", "1.0"))
        self.seen: list[list[str]] = []
        self.stands: list[str] = []
        self.membership.on_change(self._seen)

    def _seen(self, change: MembershipChange) -> None:
        self.seen.append(self.names())
        self.stands.append(str(self.membership.state.join_state))

    async def start(self) -> None:
        await self.membership.start(self.member, CLUSTER)


@asynccontextmanager
async def joined(url: str, *names: str) -> AsyncIterator[list[Watched]]:
    """Brokers that have joined, each with a consumer, and know of each other."""
    brokers = [Watched(url, name) for name in names]
    try:
        for broker in brokers:
            broker.host(broker.member.name.encode())
        await asyncio.gather(*(broker.start() for broker in brokers))
        for broker in brokers:
            await broker.until(lambda at=broker: set(at.owners()) == set(names), "all deal")  # type: ignore[misc]
        yield brokers
    finally:
        await asyncio.gather(*(broker.membership.stop() for broker in brokers))


async def told(teller: Watched, *others: Watched) -> None:
    """Returns once others were told what `teller` tells from now on: that a topic's record changed."""
    for other in others:
        other.changes = MembershipChange(0)
    teller.membership.topics_changed()
    for other in others:
        await other.until(lambda at=other: MembershipChange.TOPICS in at.changes, "told of changed topics")  # type: ignore[misc]


async def every(brokers: list[Watched], holds: Callable[[Watched], object], what: str) -> None:
    """Returns once it holds for all of them."""
    for broker in brokers:
        await broker.until(lambda at=broker: holds(at), what)  # type: ignore[misc]


def broker_process(url: str, name: str) -> subprocess.Popen[str]:
    """A broker in a process of its own, which prints a line once it has joined."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sync.etcd_brokers", url, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


async def _main(url: str, name: str) -> None:
    broker = Watched(url, name, "process")
    broker.host(name.encode())
    await broker.start()
    print("joined", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
