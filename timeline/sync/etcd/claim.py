"""What stands before joining: the cluster under the prefix is ours, and nobody else has this broker's name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from timeline.sync.etcd.client import Client, Entry
from timeline.sync.etcd.records import Keys, Unreadable, broker_value, cluster_value, read_broker, read_cluster
from timeline.sync.membership import Member, MembershipRefused

LOOK_S = 0.25
"""Between two looks at a namesake."""
ROUNDED_S = 1.2
"""What a lease has left is told in whole seconds, and the answer takes a moment."""
ALIVE = 2
"""So often a namesake's lease has to be seen renewed before it is taken for alive. Once may have been a new leader of
etcd, which gives all leases their whole time again."""


def agree(client: Client, keys: Keys, cluster_uid: str, by: str) -> None:
    """Writes down whose cluster this is, where nobody has yet. Raises MembershipRefused when it is another's."""
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


@dataclass(slots=True)
class Claim:
    """A broker's way to its entry. `session`: see `records.broker_value`. `rest(seconds)` waits, and answers False when
    the broker is to end; `say` is told what is waited for."""

    client: Client
    keys: Keys
    member: Member
    session: str
    ttl_s: int
    rest: Callable[[float], bool]
    say: Callable[[str], None]

    def made(self) -> int:
        """The lease that the broker's entry is bound to, once it is there; 0 when the broker is to end. Waits while the
        entry of a dead namesake runs out. Raises MembershipRefused when the namesake lives."""
        key, value = self.keys.broker(self.member.name), broker_value(self.member, self.session)
        lease = self.client.grant(self.ttl_s)
        left_s, seen_s, renewed = float("inf"), time.monotonic(), 0
        while not self.client.create(key, value, lease):
            other = self.client.get(key)
            if other is None:
                continue
            address, session = self._read(other)
            if session == self.session:
                # Ours: the answer to an earlier attempt was lost, or somebody took the lease of the last from us.
                if other.lease:
                    self.client.revoke(other.lease)
                else:
                    self.client.remove(other)  # written anew by hand, and bound to nothing that would end it
                continue
            if other.lease:
                now_left_s, now_s = self.client.remaining_s(other.lease), time.monotonic()
                # Told in whole seconds: what a lease has left, unless somebody renewed it, is less by what went by.
                if now_left_s > left_s - (now_s - seen_s) + ROUNDED_S:
                    renewed += 1
                    left_s, seen_s = now_left_s, now_s
                elif left_s == float("inf"):
                    left_s, seen_s = now_left_s, now_s
            if renewed >= ALIVE or not other.lease:
                self.client.revoke(lease)
                raise MembershipRefused(
                    f"another broker is called {self.member.name!r} in this cluster, at {address}: give each a name of "
                    "its own with --name"
                )
            self.say(
                f"etcd has a broker called {self.member.name!r} already, at {address}; if that is this one before it "
                f"was restarted, its entry goes within {self.ttl_s} s"
            )
            if not self.rest(LOOK_S):
                self.client.revoke(lease)
                return 0
            self.client.keep_alive(lease)
        return lease

    def _read(self, other: Entry) -> tuple[str, str]:
        try:
            member, session = read_broker(self.member.name, other.value)
        except Unreadable as bad:
            return f"an address that cannot be read ({bad})", ""
        return member.address, session
