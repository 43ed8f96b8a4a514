"""The thread that keeps a broker in its cluster: joins, refreshes its lease, tells what it hosts, reads what others do.

One loop, `_attend`, goes on as long as one member of etcd answers; when it does not, the next one is asked. What the
thread learns it hands over as a `Told`. What the broker wants told it leaves in `host` and `topics_changed`, which
never wait. A watch only hints that something changed: what did is always read.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from timeline.sync.etcd import records
from timeline.sync.etcd.claim import Claim, agree
from timeline.sync.etcd.client import Client, EtcdTrouble, LeaseLost, Watch
from timeline.sync.etcd.picture import Hosting, Picture, with_lingering
from timeline.sync.etcd.url import Place
from timeline.sync.membership import Member, MembershipRefused, Standing

log = logging.getLogger("timeline.sync")

LEAST_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often and how long, in seconds. `relist`: all is read again, whatever the watch told. `settle`: changes of
    what is hosted are gathered so long. `look`: between two readings, however much changes. `retry`: the first and
    the longest wait once no member of etcd answered. `refused`: before a broker that is refused tries again."""

    relist: float = 15.0
    settle: float = 0.1
    look: float = 0.02
    retry: tuple[float, float] = (0.1, 1.0)
    refused: float = 5.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the thread has learned. `others` (this broker may be among them), `hosting`: None where it is as it was.
    `topics`: records have changed. `refused`: this broker never joined, and trying again would not help."""

    standing: Standing
    reason: str = ""
    others: Sequence[Member] | None = None
    hosting: Hosting | None = None
    topics: bool = False
    refused: MembershipRefused | None = None


class Session(threading.Thread):
    """`confirmed_s`: when etcd last answered what it can only answer with a quorum, monotonic; 0 before the first time.
    `tell` is called by this thread; `ended`, too, when it is over."""

    def __init__(
        self,
        place: Place,
        member: Member,
        cluster_uid: str,
        tell: Callable[[Told], None],
        ended: Callable[[], None],
        pace: Pace,
    ) -> None:
        super().__init__(name="etcd", daemon=True)
        self.confirmed_s = 0.0
        self._place, self._member, self._cluster_uid, self._pace = place, member, cluster_uid, pace
        self._tell, self._ended = tell, ended
        self._keys = records.Keys(place.prefix)
        self._id = secrets.token_hex(8)

        # Shared with the event loop and the watch's thread, under _wake. _dirty: keys to be told, _dirty_s: since when.
        self._wake = threading.Condition()
        self._wanted: dict[str, tuple[str, tuple[bytes, ...]]] = {}
        self._dirty: set[str] = set()
        self._dirty_s = 0.0
        self._topics_pending = False
        self._hinted = False
        self._watch_ended = ""
        self._stopping = False

        # This thread's own. _written: what etcd has of ours, as far as we know. Times (_s) are monotonic.
        self._at = self._failures = self._lease = 0
        self._joined = False
        self._standing, self._reason = Standing.JOINING, ""
        self._written: dict[str, str] = {}
        self._picture = Picture(self._keys)
        self._topics_told = -1
        self._believed: tuple[Sequence[Member], Hosting] = ((), {})
        self._lingering: tuple[Sequence[Member], Hosting] = ((), {})
        self._linger_until_s = 0.0
        self._watch: Watch | None = None
        self._refresh_s = self._relist_s = self._look_s = 0.0

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        """What this broker hosts of the topic from now on."""
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
        """Others are to read topic records again."""
        with self._wake:
            self._topics_pending = True
            self._wake.notify()

    def stop(self) -> None:
        """Leaves and ends; does not wait for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Until `stop`, or until it is refused before it has ever joined."""
        try:
            while not self._stopping:
                self._once()
        finally:
            self._ended()

    def _once(self) -> None:
        """Asks one member of etcd as long as it answers; waits a while after the last of them did not."""
        client: Client | None = None
        try:
            client = Client(self._place, self._place.endpoints[self._at], max(LEAST_DEADLINE_S, self._place.ttl_s / 4))
            self._attend(client)
            self._leave(client)
        except EtcdTrouble as trouble:
            self._stumbled(str(trouble))
        except MembershipRefused as refused:
            self._refused(refused)
        except Exception as error:
            log.exception("the membership stumbled and goes on")
            self._stumbled(f"an error of this program: {error!r}")
        finally:
            self._drop_watch()
            if client is not None:
                client.close()

    def _attend(self, client: Client) -> None:
        """Joins where that is needed, and does what is to be done when it is to be done, until `stop`."""
        self._refresh_s = 0.0
        while not self._stopping:
            try:
                if self._lease:
                    self._turn(client)
                else:
                    self._join(client)
            except LeaseLost as lost:
                self._lost(lost)

    def _turn(self, client: Client) -> None:
        """One round: what is due now is done, then it waits for whatever comes first."""
        now_s = time.monotonic()
        if now_s >= self._refresh_s:
            client.keep_alive(self._lease)
            self._refreshed()
        if self._watch is None:
            if now_s >= self._look_s:
                self._read_all(client)
                self._watch = client.watch(self._keys.every, self._picture.revision + 1, self._hint, self._broken)
        elif now_s >= self._relist_s or (self._hinted and now_s >= self._look_s):
            self._read_changes(client)
        self._write(client)
        self._say_joined()
        self._failures = 0
        self._rest()

    def _rest(self) -> None:
        """Waits until something is to be done."""
        with self._wake:
            times = [self._refresh_s, self._relist_s]
            if self._hinted or self._watch is None:
                times.append(self._look_s)
            if self._dirty:
                times.append(self._dirty_s + self._pace.settle)
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
        """The broker gets an entry and a lease, unless it is to end."""
        agree(client, self._keys, self._cluster_uid, self._member.name)
        claim = Claim(client, self._keys, self._member, self._id, self._place.ttl_s, self._pause, self._waits)
        lease = claim.made()
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

    def _lost(self, lost: LeaseLost) -> None:
        """The lease is gone: all of ours is to be written again. Others may have lost theirs with it, and may need the
        same moment to come back: they are believed in for two TTL more."""
        log.warning("this broker has to join again: %s", lost)
        self._lease, self._written = 0, {}
        self._lingering, self._linger_until_s = self._believed, time.monotonic() + 2 * self._place.ttl_s
        self._pause(self._pace.look)

    def _leave(self, client: Client) -> None:
        try:
            if self._lease:
                client.revoke(self._lease)
        except (EtcdTrouble, MembershipRefused) as trouble:
            log.info("others will notice that this broker left once its lease runs out: %s", trouble)

    def _refreshed(self) -> None:
        self.confirmed_s = time.monotonic()
        self._refresh_s = self.confirmed_s + self._place.ttl_s / 3

    def _read_all(self, client: Client) -> None:
        self._before_reading()
        self._picture.read(client.list(self._keys.every))
        self._have_read()

    def _read_changes(self, client: Client) -> None:
        self._before_reading()
        if self._picture.update(client.list(self._keys.every, self._picture.revision + 1)):
            self._have_read()
        else:
            self._read_all(client)

    def _before_reading(self) -> None:
        now_s = time.monotonic()
        self._look_s, self._relist_s = now_s + self._pace.look, now_s + self._pace.relist
        with self._wake:
            self._hinted = False  # what changes from now on hints again

    def _have_read(self) -> None:
        """Raises LeaseLost when somebody took this broker's entry away; what else of ours is missing is told again."""
        self.confirmed_s = time.monotonic()
        mine = self._picture.entries.get(self._keys.broker(self._member.name))
        if mine is None or mine.lease != self._lease:
            raise LeaseLost("its entry in etcd was taken away")
        for key, value in list(self._written.items()):
            entry = self._picture.entries.get(key)
            if entry is None or entry.lease != self._lease or entry.value != value.encode():
                del self._written[key]
                with self._wake:
                    self._dirty.add(key)
                    self._dirty_s = 0.0

    def _write(self, client: Client) -> None:
        """Tells what this broker hosts once it has settled, and that topic records changed. What may not have been
        written is written again."""
        with self._wake:
            topics, self._topics_pending = self._topics_pending, False
            due = bool(self._dirty) and time.monotonic() >= self._dirty_s + self._pace.settle
            keys, self._dirty = (self._dirty, set()) if due else (set(), self._dirty)
            wanted = {key: self._wanted.get(key) for key in keys}
        values = {key: records.consumers_value(*hosted) if hosted else None for key, hosted in wanted.items()}
        changes = {key: value for key, value in values.items() if value is None or self._written.get(key) != value}
        for key in changes:
            self._written.pop(key, None)
        try:
            if changes:
                client.change(changes, self._lease)
            if topics:
                client.change({self._keys.topics: records.topics_value(self._member.name)})
        except BaseException:
            with self._wake:
                self._dirty |= keys
                self._topics_pending |= topics
            raise
        self._written.update({key: value for key, value in changes.items() if value is not None})

    def _hint(self) -> None:
        """By the watch: something changed."""
        with self._wake:
            self._hinted = True
            self._wake.notify()

    def _broken(self, why: str) -> None:
        """By the watch: it tells no more."""
        with self._wake:
            self._watch_ended = why
            self._wake.notify()

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _say_joined(self) -> None:
        """Tells what has changed of what is believed."""
        if self._linger_until_s and time.monotonic() >= self._linger_until_s:
            self._lingering, self._linger_until_s = ((), {}), 0.0
        believed = with_lingering(self._picture.members(), self._picture.hosting(), *self._lingering)
        topics = self._picture.topics_revision != self._topics_told
        if believed == self._believed and not topics and self._standing is Standing.JOINED:
            return
        if self._standing is Standing.FROZEN:
            log.warning("etcd answers again")
        self._standing, self._reason = Standing.JOINED, ""
        self._believed, self._topics_told = believed, self._picture.topics_revision
        self._tell(Told(Standing.JOINED, "", *believed, topics))

    def _waits(self, reason: str) -> None:
        """It cannot join, or cannot ask, and says why."""
        self._stand(Standing.FROZEN if self._joined else Standing.JOINING, reason)

    def _stand(self, standing: Standing, reason: str) -> None:
        if standing is not self._standing or not self._reason:
            log.warning("membership %s: %s", standing, reason)
        if (standing, reason) != (self._standing, self._reason):
            self._standing, self._reason = standing, reason
            self._tell(Told(standing, reason))

    def _stumbled(self, reason: str) -> None:
        """The member of etcd that was asked is no good: the next one is."""
        self._failures += 1
        every = len(self._place.endpoints)
        self._at = (self._at + 1) % every
        if self._failures < every or self._stopping:
            return
        self._waits(reason)
        first_s, longest_s = self._pace.retry
        wait_s = min(longest_s, first_s * 2.0 ** min(self._failures // every - 1, 16))
        self._pause(wait_s * random.uniform(0.5, 1.0))

    def _refused(self, refused: MembershipRefused) -> None:
        if self._joined:
            self._stand(Standing.REFUSED, str(refused))
            self._pause(self._pace.refused)
        else:
            self._stopping = True
            self._tell(Told(Standing.APART, str(refused), refused=refused))

    def _pause(self, seconds: float) -> bool:
        """Waits so long; False when it is to end."""
        with self._wake:
            return not self._wake.wait_for(lambda: self._stopping, seconds)
