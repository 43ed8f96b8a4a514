"""The keys that a cluster has in etcd and their values: JSON that people can read with `etcdctl get --prefix`.

```
/PREFIX/cluster          {"format": 1, "cluster": "9f…", "by": "b1"}              for good
/PREFIX/brokers/b1       {"format": 1, "address": "10.0.0.7:9000", …}             with b1's lease
/PREFIX/consumers/b1/77  {"format": 1, "topic": "departures", "healthy": 3, …}  with b1's lease
/PREFIX/topics           {"format": 1, "by": "b1"}                                for good; its revision counts
```

Names of brokers stand percent-encoded in keys. Unknown fields of a known format are left alone, unknown keys too, so
that a later version may add some; what it may not do without a new format is give a field another meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from timeline.config import check_address
from timeline.errors import Invalid
from timeline.sync.membership import Member, MembershipRefused

FORMAT = 1
IDS_SHOWN = 50
"""So many consumers of a topic and broker are named for people; the count counts."""
MOST_CONSUMERS = 1_000_000_000
"""Of one topic on one broker; who deals what is reckoned from it in 64 bits."""
MAX_TEXT_BYTES = 255


class Unreadable(ValueError):
    """A value that this version cannot read; the message says why."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys under a prefix."""

    prefix: str

    @property
    def every(self) -> str:
        """What all of them begin with."""
        return f"/{self.prefix}/"

    @property
    def cluster(self) -> str:
        return f"/{self.prefix}/cluster"

    @property
    def topics(self) -> str:
        return f"/{self.prefix}/topics"

    def broker(self, name: str) -> str:
        return f"/{self.prefix}/brokers/{quote(name, safe='')}"

    def consumers(self, broker: str, topic_uid: int) -> str:
        return f"/{self.prefix}/consumers/{quote(broker, safe='')}/{topic_uid}"

    def broker_of(self, key: str) -> str | None:
        """Whose entry `key` is; None for another kind of key."""
        head, _, name = key.removeprefix(self.every).partition("/")
        return unquote(name) if head == "brokers" and name and "/" not in name else None

    def consumers_of(self, key: str) -> tuple[str, int] | None:
        """The broker and the topic whose consumers `key` tells; None for another kind of key."""
        parts = key.removeprefix(self.every).split("/")
        if len(parts) != 3 or parts[0] != "consumers" or re.fullmatch(r"-?[0-9]{1,20}", parts[2]) is None:
            return None
        return unquote(parts[1]), int(parts[2])


def cluster_value(cluster_uid: str, by: str) -> str:
    return _encoded({"cluster": cluster_uid, "by": by})


def broker_value(member: Member, session: str) -> str:
    """`session`: random, of this start of the broker; by it a broker knows its own entry from that of a namesake."""
    return _encoded({"address": member.address, "version": member.version, "session": session})


def consumers_value(topic: str, consumers: Collection[bytes]) -> str:
    ids = sorted(id.decode(errors="replace") for id in consumers)
    return _encoded({"topic": topic, "healthy": len(ids), "consumers": ids[:IDS_SHOWN]})


def topics_value(by: str) -> str:
    return _encoded({"by": by})


def read_cluster(value: bytes, key: str) -> str:
    """The uid of the cluster's store. Raises MembershipRefused for what this version cannot read."""
    try:
        return _text(_decoded(value), "cluster")
    except Unreadable as bad:
        raise MembershipRefused(
            f"{key} in etcd is of another version of Timeline, or not Timeline's ({bad}): upgrade this broker, or give "
            "the cluster a prefix of its own in --sync"
        ) from bad


def read_broker(name: str, value: bytes) -> tuple[Member, str]:
    """A member and its session. Raises Unreadable."""
    fields = _decoded(value)
    address, version, session = (_text(fields, field) for field in ("address", "version", "session"))
    if address:
        try:
            check_address("address", address)
        except Invalid as bad:
            raise Unreadable(bad.reason) from None
    if not name.isprintable() or len(name.encode()) > MAX_TEXT_BYTES or len(version.encode()) > MAX_TEXT_BYTES:
        raise Unreadable(f"a broker's name and version have up to {MAX_TEXT_BYTES} printable bytes")
    return Member(name, address, version), session


def read_consumers(value: bytes) -> int:
    """How many healthy consumers it tells. Raises Unreadable."""
    healthy = _decoded(value).get("healthy")
    if not isinstance(healthy, int) or isinstance(healthy, bool) or not 0 <= healthy <= MOST_CONSUMERS:
        raise Unreadable(f"healthy is no count from 0 to {MOST_CONSUMERS}")
    return healthy


def _encoded(fields: Mapping[str, object]) -> str:
    return json.dumps({"format": FORMAT, **fields}, ensure_ascii=False)


def _decoded(value: bytes) -> Mapping[str, object]:
    try:
        fields = json.loads(value)
    except ValueError as bad:  # text that is not UTF-8 as well
        raise Unreadable("it is not JSON") from bad
    except RecursionError as deep:
        raise Unreadable("it is nested too deeply") from deep
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise Unreadable('it has no "format"')
    if fields["format"] != FORMAT:
        raise Unreadable(f"it has format {fields['format']}, and this version reads {FORMAT}")
    return fields


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Unreadable(f"{name} is no text")
    return value
