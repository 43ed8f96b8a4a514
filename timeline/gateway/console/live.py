"""What pages show live: how brokers and topics fare, looked at once for all pages of the same token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.errors import Forbidden, TimelineError
from timeline.gateway.clients import UNAUTHENTICATED, CallerClient
from timeline.gateway.console.rendering import part
from timeline.gateway.console.visit import sentence, visiting
from timeline.gateway.problems import ClientGone
from timeline.gateway.requests import ApiRequest, while_connected
from timeline.gateway.service import HttpGateway
from timeline.watcher import OBJECTIVE_MS, Snapshot, TopicSnapshot, Watcher, largest_of, outlooks_of

OLD_MS = 6_000.0
"""How old a look may be while the next one is under way."""
LOOK_MS = 2_000.0
"""How old a look may be before a page asks for another one."""
AHEAD_MS = 10_000.0
"""How old the load of the next hour may be. To count it costs brokers more than the rest."""
SECONDS_AHEAD = 60
TOPICS_AHEAD = 50
"""Topics whose next hour is counted, those with the most that waits."""
TOPICS_SHOWN = 200
HOUR = ("1h", "1m")


@dataclass(frozen=True, slots=True)
class TopicAhead:
    """Messages of a topic that come due within the next minute and the next hour."""

    minute: int
    hour: int


@dataclass(frozen=True, slots=True)
class LiveLook:
    """Brokers and topics at one moment. `trouble`: why no newer one could be had."""

    seen: Snapshot
    ahead: dict[str, TopicAhead]
    trouble: str = ""

    @property
    def partly(self) -> str:
        """Whose load of the next hour is counted, if it is not that of all topics."""
        return f", {TOPICS_AHEAD} largest topics" if len(self.seen.topics) > TOPICS_AHEAD else ""

    @property
    def topics(self) -> list[TopicSnapshot]:
        """The topics by name: all, or those with the most to do if there are very many."""
        if len(self.seen.topics) <= TOPICS_SHOWN:
            return [*self.seen.topics]
        busy = sorted(self.seen.topics, key=lambda one: (one.due, one.delivered_per_s or 0.0, one.waiting or 0))
        return sorted(busy[-TOPICS_SHOWN:], key=lambda one: one.name)

    @property
    def missing(self) -> dict[str, int]:
        """Buckets that no broker dispatches, by topic. One that does not answer here may dispatch them."""
        if self.seen.unreachable:
            return {}
        have: dict[str, int] = {}
        of: dict[str, int] = {}
        for load in (load for broker in self.seen.brokers for load in broker.topics):
            have[load.topic] = have.get(load.topic, 0) + load.dealt
            of[load.topic] = max(of.get(load.topic, 0), load.buckets)
        return {topic: count - have[topic] for topic, count in of.items() if count > have[topic]}

    @property
    def stuck(self) -> bool:
        """Whether a message is due for longer than the objective of lateness allows."""
        return any(self.overdue_ms(one) > OBJECTIVE_MS for one in self.seen.topics)

    def overdue_ms(self, topic: TopicSnapshot) -> int:
        """Return for how long the oldest due message of a topic waits. 0: none is due."""
        return max(0, self.seen.now_ms - topic.next_due_ms) if topic.due and topic.next_due_ms else 0


class _Lookout:
    """Looks for all pages of one token, one look at a time."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._watcher, self._clock = timeline, Watcher(timeline), Clock()
        self._looking = asyncio.Lock()
        self._look: LiveLook | None = None
        self._looked_ms = self._counted_ms = -AHEAD_MS

    async def look(self) -> LiveLook:
        """Return a look that is new enough, or the last one with the trouble. While brokers are slow to answer, return
        the last one for a while. Raise TimelineError before the first, and Forbidden."""
        recent = self._clock.monotonic_ms() < self._looked_ms + OLD_MS
        if self._look is not None and recent and self._looking.locked():
            return self._look
        async with self._looking:
            now_ms = self._clock.monotonic_ms()
            if self._look is None or now_ms >= self._looked_ms + LOOK_MS:
                self._look = await self._again(now_ms)
                self._looked_ms = self._clock.monotonic_ms()
            return self._look

    async def _again(self, now_ms: float) -> LiveLook:
        before = self._look
        try:
            seen = await self._watcher.look(SECONDS_AHEAD)
            if seen.unknown and before is not None:
                return replace(before, trouble=f"topics are not known: {seen.unknown}")
            ahead = {} if before is None else before.ahead
            if before is None or now_ms >= self._counted_ms + AHEAD_MS:
                ahead = await self._count(seen)
                self._counted_ms = now_ms
            return LiveLook(seen, ahead)
        except Forbidden:
            raise
        except TimelineError as trouble:
            if before is None:
                raise
            return replace(before, trouble=sentence(trouble))

    async def _count(self, seen: Snapshot) -> dict[str, TopicAhead]:
        asked = {name: self._timeline.forecast(name, *HOUR) for name in largest_of(seen.topics, TOPICS_AHEAD)}
        told = await outlooks_of(asked)
        return {name: TopicAhead(int(one.counts[0]), int(one.counts.sum())) for name, one in told.items()}


_LOOKOUTS: WeakKeyDictionary[CallerClient, _Lookout] = WeakKeyDictionary()


async def look_of(client: CallerClient) -> LiveLook:
    """Return how brokers and topics fare, as the token of `client` may see it. Raise TimelineError."""
    lookout = _LOOKOUTS.get(client)
    if lookout is None:
        lookout = _LOOKOUTS[client] = _Lookout(client.timeline)
    return await lookout.look()


async def looks(request: ApiRequest, gateway: HttpGateway, template: str) -> AsyncGenerator[bytes, None]:
    """Yield a part of a page, made from each new look, until its reader leaves or the gateway ends."""
    async with visiting(request) as visit:
        try:
            yield b"retry: 2000\n\n"
            while not gateway.stopping.is_set():
                look: LiveLook | None = await while_connected(request, _next(visit.client), gateway.ending)
                if look is not None:
                    yield event("look", part(template, look=look))
        except ClientGone:
            return
        except TimelineError as trouble:
            login = isinstance(trouble, Forbidden) and UNAUTHENTICATED in trouble.found
            yield LOGIN if login else event("trouble", part("_trouble.html", sentence=sentence(trouble)))


def event(name: str, text: str) -> bytes:
    """Return a server-sent event."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode("utf-8", "replace")


LOGIN = event("login", "login")
"""Leads to the page that asks for a token."""


async def _next(client: CallerClient) -> LiveLook:
    await asyncio.sleep(LOOK_MS / 1000)
    return await look_of(client)
