"""Membership through etcd: on the event loop a `View`, and the thread that keeps it current.

The thread joins, refreshes its lease, writes what the broker hosts, and reads others. One loop, `_attend`, goes on as
long as one member of etcd answers. Then the next one is asked. The thread passes on what it learns as a
`ClusterUpdate`. The broker leaves news in `host` and `topics_changed`, which never wait. A watch only hints that
something changed; the change itself is always read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from timeline.sync.etcd.client import (
    Client,
    EtcdEntry,
    EtcdLeaseLost,
    EtcdLocation,
    EtcdTrouble,
    EtcdWatch,
    location_of,
)
from timeline.sync.etcd.records import (
    ClusterSnapshot,
    EtcdKeys,
    Hosting,
    Unreadable,
    broker_value,
    cluster_value,
    consumers_value,
    read_broker,
    read_cluster,
    topics_value,
    with_lingering,
)
from timeline.sync.membership import JoinState, Member, MembershipChange, MembershipRefused, MembershipState
from timeline.sync.view import ViewMembership

log = logging.getLogger("timeline.sync")

LEAST_DEADLINE_S = 1.0
LOOK_S = 0.25
"""Between two looks at a namesake's entry."""
ROUNDED_S = 1.2
"""A lease's remaining time comes in whole seconds, and the answer takes a moment."""
ALIVE = 2
"""How often a namesake's lease must be seen renewed until the namesake counts as alive. One renewal may come from a new
leader of etcd, which gives all leases their whole time again."""


def agree(client: Client, keys: EtcdKeys, cluster_uid: str, by: str) -> None:
    """Note whose cluster this is, if no broker has. Raise MembershipRefused if it is another's."""
    while not client.create(keys.cluster, cluster_value(cluster_uid, by)):
        entry = client.get(keys.cluster)
        if entry is None:
            continue  # somebody deleted it in between
        there = read_cluster(entry.value, keys.cluster)
        if there == cluster_uid:
            return
        raise MembershipRefused(
            f"the brokers under {keys.every} in etcd have another store (cluster {there:.40}) than this one (cluster "
            f"{cluster_uid:.40}): give this broker their --store, or a --sync with a prefix of its own; if that store "
            f"is gone for good, etcdctl del {keys.cluster}"
        )


@dataclass(frozen=True, slots=True)
class EtcdTiming:
    """Times in seconds. `relist`: between two reads of everything. `settle`: how long changes of what is hosted are
    gathered. `look`: between two reads, however much changes. `retry`: first and longest wait after no member of etcd
    answered. `refused`: wait before a refused broker tries again."""

    relist: float = 15.0
    settle: float = 0.1
    look: float = 0.02
    retry: tuple[float, float] = (0.1, 1.0)
    refused: float = 5.0


@dataclass(frozen=True, slots=True)
class ClusterUpdate:
    """News from the thread. `others` (this broker may be among them), `hosting`: None if unchanged. `topics`: records
    have changed. `refused`: this broker never joined, and trying again would not help."""

    join_state: JoinState
    reason: str = ""
    others: Sequence[Member] | None = None
    hosting: Hosting | None = None
    topics: bool = False
    refused: MembershipRefused | None = None


class EtcdSession(threading.Thread):
    """The thread. `confirmed_s`: when etcd last gave an answer that needs a quorum, monotonic; 0 before the first time.
    The thread calls `tell`, and `ended` when it is over."""

    def __init__(
        self,
        location: EtcdLocation,
        member: Member,
        cluster_uid: str,
        tell: Callable[[ClusterUpdate], None],
        ended: Callable[[], None],
        timing: EtcdTiming,
    ) -> None:
        super().__init__(name="etcd", daemon=True)
        self.confirmed_s = 0.0
        self._location, self._member, self._cluster_uid, self._timing = location, member, cluster_uid, timing
        self._tell, self._ended = tell, ended
        self._keys = EtcdKeys(location.prefix)
        self._id = secrets.token_hex(8)

        # Shared with the event loop and the watch's thread, under _wake. _dirty: keys to write, _dirty_s: since when.
        self._wake = threading.Condition()
        self._wanted: dict[str, tuple[str, tuple[bytes, ...]]] = {}
        self._dirty: set[str] = set()
        self._dirty_s = 0.0
        self._topics_pending = False
        self._hinted = False
        self._watch_ended = ""
        self._stopping = False

        # This thread's own. _written: our entries that etcd has, as far as is known. Times (_s) are monotonic.
        self._at = self._failures = self._lease = 0
        self._joined = False
        self._join_state, self._reason = JoinState.JOINING, ""
        self._written: dict[str, str] = {}
        self._snapshot = ClusterSnapshot(self._keys)
        self._topics_told = -1
        self._believed: tuple[Sequence[Member], Hosting] = ((), {})
        self._lingering: tuple[Sequence[Member], Hosting] = ((), {})
        self._linger_until_s = 0.0
        self._watch: EtcdWatch | None = None
        self._refresh_s = self._relist_s = self._look_s = 0.0

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        """Set what this broker hosts of the topic."""
        key = self._keys.consumers(self._member.name, topic_uid)
        with self._wake:
            if consumers:
                self._wanted[key] = topic, tuple(consumers)
            elif self._wanted.pop(key, None) is None:
                return
            if not self._dirty:
                self._dirty_s = time.monotonic()
            self._dirty.add(key)
            self._wake.notify()

    def topics_changed(self) -> None:
        """Tell others to read topic records again."""
        with self._wake:
            self._topics_pending = True
            self._wake.notify()

    def stop(self) -> None:
        """Have it leave and end, without waiting."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Run until `stop`, or until it is refused before it has ever joined."""
        try:
            while not self._stopping:
                self._once()
        finally:
            self._ended()

    def _once(self) -> None:
        """Ask one member of etcd as long as it answers. Wait after the last of them did not."""
        client: Client | None = None
        try:
            client = Client(
                self._location, self._location.endpoints[self._at], max(LEAST_DEADLINE_S, self._location.ttl_s / 4)
            )
            self._attend(client)
            self._leave(client)
        except EtcdTrouble as trouble:
            self._stumbled(str(trouble))
        except MembershipRefused as refused:
            self._refused(refused)
        except Exception as error:
            log.exception("the membership failed and goes on")
            self._stumbled(f"an error of this program: {error!r}")
        finally:
            self._drop_watch()
            if client is not None:
                client.close()

    def _attend(self, client: Client) -> None:
        """Join if needed, and do what is due, until `stop`."""
        self._refresh_s = 0.0
        while not self._stopping:
            try:
                if self._lease:
                    self._turn(client)
                else:
                    self._join(client)
            except EtcdLeaseLost as lost:
                self._lost(lost)

    def _turn(self, client: Client) -> None:
        """Do what is due now, then wait for what comes first."""
        now_s = time.monotonic()
        if now_s >= self._refresh_s:
            client.keep_alive(self._lease)
            self._refreshed()
        if self._watch is None:
            if now_s >= self._look_s:
                self._read_all(client)
                self._watch = client.watch(self._keys.every, self._snapshot.revision + 1, self._hint, self._broken)
        elif now_s >= self._relist_s or (self._hinted and now_s >= self._look_s):
            self._read_changes(client)
        self._write(client)
        self._say_joined()
        self._failures = 0
        self._rest()

    def _rest(self) -> None:
        """Wait until something is due."""
        with self._wake:
            times = [self._refresh_s, self._relist_s]
            if self._hinted or self._watch is None:
                times.append(self._look_s)
            if self._dirty:
                times.append(self._dirty_s + self._timing.settle)
            if self._linger_until_s:
                times.append(self._linger_until_s)
            wait_s = min(times) - time.monotonic()
            if wait_s > 0 and not (self._stopping or self._topics_pending or self._watch_ended):
                self._wake.wait(wait_s)
            why, self._watch_ended = self._watch_ended, ""
        if why:
            log.info("etcd ended the watch, which begins again: %s", why)
            self._drop_watch()

    def _join(self, client: Client) -> None:
        """Get an entry and a lease for the broker, unless it is to end."""
        agree(client, self._keys, self._cluster_uid, self._member.name)
        lease = self._claim(client)
        if not lease:
            return
        self._lease, self._joined = lease, True
        self._refreshed()
        with self._wake:
            self._dirty.update(self._wanted)
            self._dirty_s = 0.0
        self._write(client)
        self._drop_watch()  # so that all is read
        self._look_s = 0.0
        log.info("joined the cluster under %s in etcd", self._keys.every)

    def _claim(self, client: Client) -> int:
        """Return the lease that the broker's entry is bound to, once it is there; 0 when the broker is to end. Waits
        while the entry of a dead namesake runs out. Raises MembershipRefused when the namesake lives."""
        name, ttl_s = self._member.name, self._location.ttl_s
        key, value = self._keys.broker(name), broker_value(self._member, self._id)
        lease = client.grant(ttl_s)
        left_s, seen_s, renewed = float("inf"), time.monotonic(), 0
        while not client.create(key, value, lease):
            other = client.get(key)
            if other is None:
                continue
            address, session = self._namesake(other)
            if session == self._id:
                # Ours: the answer to an earlier attempt was lost, or somebody took the lease of the last from us.
                if other.lease:
                    client.revoke(other.lease)
                else:
                    client.remove(other)  # written anew by hand, and bound to nothing that would end it
                continue
            if other.lease:
                now_left_s, now_s = client.remaining_s(other.lease), time.monotonic()
                # Told in whole seconds: what a lease has left, unless somebody renewed it, is less by what went by.
                was_renewed = now_left_s > left_s - (now_s - seen_s) + ROUNDED_S
                if was_renewed or left_s == float("inf"):
                    renewed += was_renewed
                    left_s, seen_s = now_left_s, now_s
            if renewed >= ALIVE or not other.lease:
                client.revoke(lease)
                raise MembershipRefused(
                    f"another broker is called {name!r} in this cluster, at {address}: give each a name of its own "
                    "with --name"
                )
            self._waits(
                f"etcd has a broker called {name!r} already, at {address}; if that is this one before it was "
                f"restarted, its entry goes within {ttl_s} s"
            )
            if not self._pause(LOOK_S):
                client.revoke(lease)
                return 0
            client.keep_alive(lease)
        return lease

    def _namesake(self, other: EtcdEntry) -> tuple[str, str]:
        """Return the address and the session of another broker of this name."""
        try:
            member, session = read_broker(self._member.name, other.value)
        except Unreadable as bad:
            return f"an address that cannot be read ({bad})", ""
        return member.address, session

    def _lost(self, lost: EtcdLeaseLost) -> None:
        """Note that the lease is gone, so that all of ours is written again. Others may have lost theirs at the same
        time: they are listed for two more TTLs."""
        log.warning("this broker has to join again: %s", lost)
        self._lease, self._written = 0, {}
        self._lingering, self._linger_until_s = self._believed, time.monotonic() + 2 * self._location.ttl_s
        self._pause(self._timing.look)

    def _leave(self, client: Client) -> None:
        try:
            if self._lease:
                client.revoke(self._lease)
        except (EtcdTrouble, MembershipRefused) as trouble:
            log.info("others will notice that this broker left once its lease runs out: %s", trouble)

    def _refreshed(self) -> None:
        self.confirmed_s = time.monotonic()
        self._refresh_s = self.confirmed_s + self._location.ttl_s / 3

    def _read_all(self, client: Client) -> None:
        self._before_reading()
        self._snapshot.read(client.list(self._keys.every))
        self._have_read()

    def _read_changes(self, client: Client) -> None:
        self._before_reading()
        if self._snapshot.update(client.list(self._keys.every, self._snapshot.revision + 1)):
            self._have_read()
        else:
            self._read_all(client)

    def _before_reading(self) -> None:
        now_s = time.monotonic()
        self._look_s, self._relist_s = now_s + self._timing.look, now_s + self._timing.relist
        with self._wake:
            self._hinted = False  # what changes from now on hints again

    def _have_read(self) -> None:
        """Raise EtcdLeaseLost when somebody took this broker's entry away; tell again what else of ours is missing."""
        self.confirmed_s = time.monotonic()
        mine = self._snapshot.entries.get(self._keys.broker(self._member.name))
        if mine is None or mine.lease != self._lease:
            raise EtcdLeaseLost("its entry in etcd was taken away")
        for key, value in list(self._written.items()):
            entry = self._snapshot.entries.get(key)
            if entry is None or entry.lease != self._lease or entry.value != value.encode():
                del self._written[key]
                with self._wake:
                    self._dirty.add(key)
                    self._dirty_s = 0.0

    def _write(self, client: Client) -> None:
        """Write what this broker hosts once it has settled, and that topic records changed. After a failure, write it
        again."""
        with self._wake:
            topics, self._topics_pending = self._topics_pending, False
            due = bool(self._dirty) and time.monotonic() >= self._dirty_s + self._timing.settle
            keys, self._dirty = (self._dirty, set()) if due else (set(), self._dirty)
            wanted = {key: self._wanted.get(key) for key in keys}
        values = {key: consumers_value(*hosted) if hosted else None for key, hosted in wanted.items()}
        changes = {key: value for key, value in values.items() if value is None or self._written.get(key) != value}
        for key in changes:
            self._written.pop(key, None)
        try:
            if changes:
                client.change(changes, self._lease)
            if topics:
                client.change({self._keys.topics: topics_value(self._member.name)})
        except BaseException:
            with self._wake:
                self._dirty |= keys
                self._topics_pending |= topics
            raise
        self._written.update({key: value for key, value in changes.items() if value is not None})

    def _hint(self) -> None:
        """Note a change, called by the watch."""
        with self._wake:
            self._hinted = True
            self._wake.notify()

    def _broken(self, why: str) -> None:
        """Note the end of the watch, called by the watch."""
        with self._wake:
            self._watch_ended = why
            self._wake.notify()

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _say_joined(self) -> None:
        """Pass on what has changed of what is believed."""
        if self._linger_until_s and time.monotonic() >= self._linger_until_s:
            self._lingering, self._linger_until_s = ((), {}), 0.0
        believed = with_lingering(self._snapshot.members(), self._snapshot.hosting(), *self._lingering)
        topics = self._snapshot.topics_revision != self._topics_told
        if believed == self._believed and not topics and self._join_state is JoinState.JOINED:
            return
        if self._join_state is JoinState.FROZEN:
            log.warning("etcd answers again")
        self._join_state, self._reason = JoinState.JOINED, ""
        self._believed, self._topics_told = believed, self._snapshot.topics_revision
        self._tell(ClusterUpdate(JoinState.JOINED, "", *believed, topics))

    def _waits(self, reason: str) -> None:
        """Report that it cannot join or ask, and why."""
        self._stand(JoinState.FROZEN if self._joined else JoinState.JOINING, reason)

    def _stand(self, join_state: JoinState, reason: str) -> None:
        if join_state is not self._join_state or not self._reason:
            log.warning("membership %s: %s", join_state, reason)
        if (join_state, reason) != (self._join_state, self._reason):
            self._join_state, self._reason = join_state, reason
            self._tell(ClusterUpdate(join_state, reason))

    def _stumbled(self, reason: str) -> None:
        """Go on to the next member of etcd."""
        self._failures += 1
        every = len(self._location.endpoints)
        self._at = (self._at + 1) % every
        if self._failures < every or self._stopping:
            return
        self._waits(reason)
        first_s, longest_s = self._timing.retry
        wait_s = min(longest_s, first_s * 2.0 ** min(self._failures // every - 1, 16))
        self._pause(wait_s * random.uniform(0.5, 1.0))

    def _refused(self, refused: MembershipRefused) -> None:
        if self._joined:
            self._stand(JoinState.REFUSED, str(refused))
            self._pause(self._timing.refused)
        else:
            self._stopping = True
            self._tell(ClusterUpdate(JoinState.APART, str(refused), refused=refused))

    def _pause(self, seconds: float) -> bool:
        """Wait; return False if it is to end."""
        with self._wake:
            return not self._wake.wait_for(lambda: self._stopping, seconds)


LEAVE_S = 4.0
"""How long `stop` waits for the thread, which may be in the middle of a call, and then revokes its lease."""


class EtcdMembership(ViewMembership):
    """Membership through etcd. `url`: see `client.location_of`, which raises Invalid. Needs the extra `etcd`."""

    def __init__(self, url: str | EtcdLocation, timing: EtcdTiming | None = None) -> None:
        super().__init__()
        self._location = location_of(url) if isinstance(url, str) else url
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
