"""What a lease reads of Cassandra after much was acknowledged, by the server's own traces.

The test of `test_cassandra_faults.py` does it with some thousands.
`python -m tests.storage_plugins.cassandra_tombstones` does it with a million on a node of its own: no flush, no
compaction by hand, gc_grace_seconds as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.servers.cassandra import CassandraServer
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.cassandra.session import CassandraSession
from timeline.storage_plugins.conformance.trial import T0, Trial, expect_equal, named, statuses

_READ = re.compile(r"Read (\d+) live rows and (\d+) tombstone")
TRACE_S = 30.0


class TracedSession:
    """A session every statement of which is traced. `reads`: (live rows, tombstones) of each read of a partition."""

    def __init__(self, connected: CassandraSession) -> None:
        self._session: Any = connected.session
        self._sent: list[Any] = []
        self._plain: Callable[[Any], Any] = self._session.execute_async
        self._session.execute_async = self._traced

    def _traced(self, statement: Any) -> Any:
        future = self._plain(statement, trace=True)  # type: ignore[call-arg]
        self._sent.append(future)
        return future

    def reads(self) -> list[tuple[int, int]]:
        """Ends the tracing; blocks until the server has written all of it."""
        del self._session.execute_async
        found: list[tuple[int, int]] = []
        for future in self._sent:
            for event in future.get_query_trace(max_wait=TRACE_S).events:
                read = _READ.match(event.description)
                if read is not None:
                    found.append((int(read[1]), int(read[2])))
        return found


async def acknowledge(trial: Trial, topic: Topic, count: int, at_once: int) -> None:
    """Puts, leases and acknowledges `count` messages, all with one due, a few at a time."""
    for start in range(0, count, at_once):
        await trial.stored(topic, named(at_once, f"t{start:09}"), T0, payload=b"x" * 20)
        leased = await trial.lease(topic, at_once, now_ms=T0)
        acked = await trial.settle(topic, Operation.ACK, leased.rows, now_ms=T0)
        expect_equal(set(statuses(acked)), {Status.OK}, "statuses of acks")
        expect_equal(len(acked), at_once, "number acknowledged")


async def traced_lease(trial: Trial, topic: Topic) -> list[tuple[int, int]]:
    """What the reads of one lease of five messages out of ten meet, in a process that knows nothing of the store."""
    await trial.stored(topic, named(10, "last"), T0 + 50)
    await trial.reopen()
    traced = TracedSession(trial.store._context.partition.connected)  # type: ignore[attr-defined]
    leased = await trial.lease(topic, 5, now_ms=T0 + 50)
    expect_equal(len(leased.rows), 5, "number leased")
    return await asyncio.to_thread(traced.reads)


async def _main(messages: int, buckets: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = CassandraServer(Path(folder), measured=True).start()
        try:
            async with Trial(lambda: make_store(node.url)) as trial:
                topic = await trial.topic(buckets=buckets)
                await acknowledge(trial, topic, messages, 10_000)
                reads = await traced_lease(trial, topic)
        finally:
            node.stop()
    print(f"{messages:,} acknowledged in {buckets} buckets; reads of a lease of 5 of 10, (live rows, tombstones):")
    print(", ".join(map(str, reads)))
    print("tombstones read:", sum(tombstones for _, tombstones in reads))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--buckets", type=int, default=8)
    asked = parser.parse_args()
    asyncio.run(_main(asked.messages, asked.buckets))
