"""`local://`: one broker by itself. It is the only member, and dispatches every bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from timeline.sync.membership import JoinState, Member, MembershipState
from timeline.sync.view import ViewMembership


class LocalMembership(ViewMembership):
    """A cluster of one. Nothing changes but by this broker, so that there are no callbacks."""

    async def start(self, member: Member, cluster_uid: str) -> None:
        self._view.join(member)

    async def stop(self) -> None:
        self._view.join(None)

    @property
    def state(self) -> MembershipState:
        join_state = JoinState.JOINED if self._view.myself else JoinState.APART
        return MembershipState(join_state, self._view.revision)

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        self._view.host(topic_uid, len(consumers))

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Return None, for all of them: there is no other broker."""
        return None

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        return self._view.myself if self._view.hosting(topic_uid) else None

    def topics_changed(self) -> None:
        """Do nothing: there is no other broker."""
