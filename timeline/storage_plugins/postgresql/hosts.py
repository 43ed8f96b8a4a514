"""Which server to talk to: of several hosts the one that takes writes, and never one that was promoted away from.

A standby that is promoted begins a new timeline of its own, with a higher number. A former primary that comes back by
itself, or was only cut off, takes writes as well, under the old number: what it takes is lost. All hosts are asked for
each connection, so that the one promoted last is found wherever its name stands, and a machine that does not answer
keeps nobody from the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from ssl import SSLError

import asyncpg

from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.postgresql.failures import FAILURES, REFUSED, sentence, state_of
from timeline.storage_plugins.postgresql.location import Location
from timeline.storage_plugins.postgresql.pool import Raw

log = logging.getLogger("timeline.store")

LOOK_S = 0.5
"""So long the other hosts have to answer, too, once one was found that takes writes."""
_POSITION = """
SELECT system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int8
FROM pg_control_system()
"""
_Task = asyncio.Task[Raw]


class Hosts:
    """The servers of one URL. `connect` opens a connection by what the driver is given; its class notes `system`, the
    server's lineage, and `promoted`, the number of its timeline (0: not known)."""

    def __init__(self, location: Location, connect: Callable[[str], Awaitable[Raw]], timelines: bool) -> None:
        self._location = location
        self._connect = connect
        self._timelines = timelines
        self._system = self._newest = 0
        self._told: set[int] = set()

    async def connect(self) -> Raw:
        """A connection to the one to take. Raises StoreUnavailable where there is none, or what connecting raises."""
        if not self._location.hosts:
            best = await self._reach(self._location.dsn)
        else:
            tasks = [asyncio.ensure_future(self._reach(dsn)) for dsn in self._location.hosts]
            best = None
            try:
                best = self._chosen(tasks, await _answered(tasks))
            finally:
                for task in tasks:
                    task.cancel()
                    task.add_done_callback(lambda done: _let_go(done, best))
        if best.promoted and best.system != self._system:
            self._system, self._newest = best.system, 0
        if self.behind(best):
            best.terminate()
            raise StoreUnavailable(
                f"the only server that takes writes is on timeline {best.promoted}, and another was promoted to "
                f"{self._newest} since: what this one takes would be lost; stop it, and make it a standby of the other"
            )
        self._newest = best.promoted or self._newest
        return best

    def behind(self, raw: Raw) -> bool:
        """Whether another server was promoted since the one that this is a connection to."""
        return bool(raw.promoted) and raw.system == self._system and raw.promoted < self._newest

    async def _reach(self, dsn: str) -> Raw:
        async with asyncio.timeout(self._location.timeout_ms / 1000):
            raw = await self._connect(dsn)
            try:
                if self._timelines:
                    raw.system, raw.promoted = await raw.fetchrow(_POSITION)
            except asyncpg.PostgresError:
                pass  # a standby, for those who want one; or a service that does not tell
            except BaseException:
                raw.terminate()
                raise
            return raw

    def _chosen(self, tasks: list[_Task], answered: list[_Task]) -> Raw:
        """The one promoted last among those that answered; of equals the first in the URL."""
        found = [task.result() for task in tasks if task in answered and task.exception() is None]
        if not found:
            raise self._nowhere([task.exception() or TimeoutError() for task in tasks])
        best = max(found, key=lambda raw: int(raw.promoted))
        for raw in found:
            if raw.system == best.system and raw.promoted < best.promoted and raw.promoted not in self._told:
                self._told.add(raw.promoted)
                log.warning(
                    "%s: two servers take writes; the one on timeline %d is passed over for the one on %d: stop it, "
                    "or whoever else finds it loses what it writes there",
                    *(self._location.shown, raw.promoted, best.promoted),
                )
        return best

    def _nowhere(self, errors: list[BaseException]) -> BaseException:
        """Why there is no server: what must be mended before any is found, else what each host says."""
        for error in errors:
            if _is_to_be_mended(error):
                return error
        hosts = self._location.shown.partition("://")[2].rpartition("@")[2].partition("/")[0].split(",")
        said = zip(hosts, map(_why, errors), strict=False)
        return StoreUnavailable(f"no host takes writes: {'; '.join(': '.join(pair) for pair in said)}")


def _is_to_be_mended(error: BaseException) -> bool:
    """Whether waiting does not help."""
    if isinstance(error, (SSLError, asyncpg.exceptions.ClientConfigurationError)):
        return True
    return state_of(error) in REFUSED or not isinstance(error, FAILURES)


def _why(error: BaseException) -> str:
    standby = isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched)
    return "a standby, or takes no writes" if standby else sentence(error)


async def _answered(tasks: list[_Task]) -> list[_Task]:
    """Those that have answered or failed: all, but for those that are silent long after one has answered."""
    left, within_s = set(tasks), None
    while left:
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if any(task.exception() is None for task in done):
            within_s = LOOK_S
    return [task for task in tasks if task.done()]


def _let_go(task: _Task, best: Raw | None) -> None:
    """Ends a connection that was made and not taken."""
    if not task.cancelled() and task.exception() is None and task.result() is not best:
        task.result().terminate()
