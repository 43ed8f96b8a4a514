"""Membership through etcd, on the event loop: a `View`, which an `EtcdSession` keeps current."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from timeline.sync.etcd.session import ClusterUpdate, EtcdSession, EtcdTiming
from timeline.sync.etcd.url import EtcdLocation, parse
from timeline.sync.membership import JoinState, Member, MembershipChange, MembershipRefused, MembershipState
from timeline.sync.view import ViewMembership

log = logging.getLogger("timeline.sync")

LEAVE_S = 4.0
"""How long `stop` waits for the thread, which may be in the middle of a call, and then revokes its lease."""


class EtcdMembership(ViewMembership):
    """Membership through etcd. `url`: see `url.parse`, which raises Invalid. Needs the extra `etcd`."""

    def __init__(self, url: str | EtcdLocation, timing: EtcdTiming | None = None) -> None:
        super().__init__()
        self._location = parse(url) if isinstance(url, str) else url
        self._timing = timing or EtcdTiming()
        self._join_state, self._reason = JoinState.APART, ""
        self._hosted: dict[int, tuple[str, Collection[bytes]]] = {}
        self._member: Member | None = None
        self._session: EtcdSession | None = None
        self._joined: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def start(self, member: Member, cluster_uid: str) -> None:
        if self._session is not None:
            raise RuntimeError("a membership starts once")
        if self._location.tls is not None:
            self._location.tls.check()
        loop = asyncio.get_running_loop()
        self._member, self._joined = member, loop.create_future()
        self._join_state, self._reason = JoinState.JOINING, f"no answer from {self._location} yet"
        self._session = EtcdSession(
            self._location,
            member,
            cluster_uid,
            partial(_hand_over, loop, self._told),
            partial(_hand_over, loop, self._over.set),
            self._timing,
        )
        for topic_uid, hosted in self._hosted.items():
            self._session.host(topic_uid, *hosted)
        self._session.start()
        try:
            await self._joined
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._join_state, self._reason = JoinState.APART, ""
        self._view.join(None)
        if self._session is None or self._over.is_set():
            return
        self._session.stop()
        try:
            await asyncio.wait_for(self._over.wait(), LEAVE_S)
        except TimeoutError:
            log.warning("etcd does not answer: others will notice that this broker left once its lease runs out")

    @property
    def state(self) -> MembershipState:
        confirmed_s = self._session.confirmed_s if self._session else 0.0
        stale_ms = int((time.monotonic() - confirmed_s) * 1000) if confirmed_s else 0
        return MembershipState(self._join_state, self._view.revision, stale_ms, self._reason)

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        self._view.host(topic_uid, len(consumers))
        if self._session is not None:
            self._session.host(topic_uid, topic, consumers)
        else:
            self._hosted[topic_uid] = topic, consumers

    def topics_changed(self) -> None:
        if self._session is not None:
            self._session.topics_changed()

    def _told(self, told: ClusterUpdate) -> None:
        """Take an update of the thread, on the event loop."""
        assert self._joined is not None
        if self._join_state is JoinState.APART:
            return  # it was stopped meanwhile
        change = MembershipChange(0)
        if (told.join_state, told.reason) != (self._join_state, self._reason):
            self._join_state, self._reason = told.join_state, told.reason
            change |= MembershipChange.JOIN_STATE
        if told.others is not None and told.hosting is not None:
            if self._view.myself is None:
                self._view.join(self._member)
                change |= MembershipChange.MEMBERS
            if self._view.learn(told.others, told.hosting):
                change |= MembershipChange.MEMBERS
        if told.topics:
            change |= MembershipChange.TOPICS
        if told.refused is not None and not self._joined.done():
            self._joined.set_exception(MembershipRefused(str(told.refused)))
        elif told.join_state is JoinState.JOINED and not self._joined.done():
            self._joined.set_result(None)
        if change:
            self._call_back(change)


def _hand_over(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Have the event loop call something, from the thread. A closed loop is ignored."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the event loop closed meanwhile")
