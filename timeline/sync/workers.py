"""`local://` for the workers of one machine, which are members of one cluster through their supervisor.

    worker ─ join, host, topics, beat ─▶ WorkerRegistry (the supervisor's) ─ members, hosting, topics ─▶ every worker

Messages are small dictionaries, which the processes carry as lines of JSON. Nothing here does I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from timeline.sync.membership import JoinState, Member, MembershipChange, MembershipRefused, MembershipState
from timeline.sync.view import ViewMembership

Message: TypeAlias = dict[str, Any]
BEAT_S = 1.0
"""How often a worker reports."""
SILENT_MS = 5_000.0
"""A worker that is silent for this time dispatches nothing until it reports again."""
TOPICS: Message = {"topics": True}
"""The message to workers when topic records have changed."""


class WorkerMembership(ViewMembership):
    """A worker's membership. `tell` sends a message to the supervisor, and `hear` takes its messages. After `lost` the
    supervisor is gone: what was believed last holds until this worker has drained."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        super().__init__()
        self._tell = tell
        self._joined = asyncio.Event()
        self._refused = ""
        self._join_state, self._reason = JoinState.APART, ""
        self._hosted: dict[int, int] = {}
        """Counts that the supervisor does not know yet, by topic's uid."""

    async def start(self, member: Member, cluster_uid: str) -> None:
        self._join_state, self._reason = JoinState.JOINING, "the supervisor has not answered yet"
        self._view.join(member)
        said = {"name": member.name, "address": member.address, "version": member.version}
        self._tell({"say": "join", "cluster": cluster_uid, **said})
        await self._joined.wait()
        if self._refused:
            self._join_state = JoinState.APART
            raise MembershipRefused(self._refused)

    async def stop(self) -> None:
        if self._join_state is not JoinState.APART:
            self._join_state, self._reason = JoinState.APART, ""
            self._view.join(None)
            self._tell({"say": "leave"})

    @property
    def state(self) -> MembershipState:
        return MembershipState(self._join_state, self._view.revision, 0, self._reason)

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        if self._view.host(topic_uid, len(consumers)):
            if not self._hosted:
                asyncio.get_running_loop().call_soon(self._tell_hosted)
            self._hosted[topic_uid] = len(consumers)

    def _tell_hosted(self) -> None:
        told, self._hosted = self._hosted, {}
        self._tell({"say": "host", "topics": {str(uid): count for uid, count in told.items()}})

    def topics_changed(self) -> None:
        self._tell({"say": "topics"})

    def hear(self, message: Message) -> None:
        """Take a message of the supervisor."""
        if "refused" in message:
            self._refused = message["refused"]
            self._joined.set()
        elif "topics" in message:
            self._call_back(MembershipChange.TOPICS)
        else:
            others = [Member(*each) for each in message["members"]]
            hosting = {int(uid): dict(counts) for uid, counts in message["hosting"].items()}
            news = self._view.learn(others, hosting)
            myself = self._view.myself
            if self._join_state is JoinState.JOINING and myself is not None and myself in others:
                self._join_state, self._reason = JoinState.JOINED, ""
                self._joined.set()
            if news:
                self._call_back(MembershipChange.MEMBERS)

    def lost(self) -> None:
        """Note that the supervisor is gone."""
        if self._join_state is not JoinState.APART:
            self._join_state, self._reason = JoinState.FROZEN, "the supervisor of the workers is gone"
            self._call_back(MembershipChange.JOIN_STATE)


@dataclass(slots=True)
class _RegisteredWorker:
    """A worker, as it reported itself. `there`: it reported lately."""

    member: Member
    heard_ms: float
    there: bool = True
    hosting: dict[int, int] = field(default_factory=dict)


class WorkerRegistry:
    """The supervisor's list of workers and what they host. `now_ms` is monotonic."""

    def __init__(self) -> None:
        self._registered: dict[str, _RegisteredWorker] = {}
        self._cluster_uid = ""

    def hear(self, worker: str, message: Message, now_ms: float) -> tuple[Message | None, bool]:
        """Take a message of `worker`. Return the message to answer, and whether all others are to be told.

        A refusal goes to the worker alone. Others get the message; None: they get `state`, if that is news."""
        said, known = message["say"], self._registered.get(worker)
        if said == "join":
            if self._registered and message["cluster"] != self._cluster_uid:
                return {"refused": "the other workers have another store: end all of them, then begin again"}, False
            self._cluster_uid = message["cluster"]
            member = Member(message["name"], message["address"], message["version"])
            self._registered[worker] = _RegisteredWorker(member, now_ms)
            return None, True
        if known is None:
            return None, False  # it has not joined yet, or has left
        known.heard_ms = now_ms
        news, known.there = not known.there, True
        if said == "leave":
            return None, self.gone(worker)
        if said == "host":
            for uid, count in message["topics"].items():
                known.hosting[int(uid)] = count
            return None, True
        if said == "topics":
            return TOPICS, True
        return None, news

    def gone(self, worker: str) -> bool:
        """Remove a worker that has ended. Return whether that is news."""
        return self._registered.pop(worker, None) is not None

    def fall_silent(self, now_ms: float) -> list[str]:
        """Set workers that were silent for too long aside. Return their names."""
        silent = [name for name, one in self._registered.items() if one.there and now_ms - one.heard_ms > SILENT_MS]
        for name in silent:
            self._registered[name].there = False
        return silent

    @property
    def state(self) -> Message:
        """Return the members and what they host, for every worker."""
        there = [one for one in self._registered.values() if one.there]
        hosting: dict[str, dict[str, int]] = {}
        for one in there:
            for uid, count in one.hosting.items():
                if count:
                    hosting.setdefault(str(uid), {})[one.member.name] = count
        return {
            "members": [[one.member.name, one.member.address, one.member.version] for one in there],
            "hosting": hosting,
        }
