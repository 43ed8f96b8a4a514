"""Keys and values in etcd, and what a listing of them means."""

from __future__ import annotations

import json

import pytest

from timeline.sync import Member, MembershipRefused
from timeline.sync.etcd import records
from timeline.sync.etcd.client import MOST_AT_ONCE, EtcdEntry, Listing
from timeline.sync.etcd.records import ClusterSnapshot, EtcdKeys, Unreadable, with_lingering
from timeline.sync.view import assign

KEYS = EtcdKeys("prod/timeline")
B1, B2 = Member("b1", "10.0.0.1:9000", "1.2"), Member("b/ 2", "10.0.0.2:9000", "1.3")


def broker(member: Member, revision: int = 1) -> EtcdEntry:
    return EtcdEntry(KEYS.broker(member.name), records.broker_value(member, "s").encode(), revision, 5)


def consumers(member: Member, uid: int, count: int, revision: int = 1) -> EtcdEntry:
    value = records.consumers_value("t", [b"%d" % number for number in range(count)])
    return EtcdEntry(KEYS.consumers(member.name, uid), value.encode(), revision, 5)


def snapshot(*entries: EtcdEntry, revision: int = 1) -> ClusterSnapshot:
    made = ClusterSnapshot(KEYS)
    made.read(Listing(entries, revision, len(entries)))
    return made


def test_names_come_back_from_keys() -> None:
    for name in ("b1", "b/ 2", "ω%2F", ".."):
        assert KEYS.broker_of(KEYS.broker(name)) == name
        assert KEYS.consumers_of(KEYS.consumers(name, -77)) == (name, -77)
        assert KEYS.broker_of(KEYS.consumers(name, 1)) is None and KEYS.consumers_of(KEYS.broker(name)) is None
    assert KEYS.broker("b/ 2") == "/prod/timeline/brokers/b%2F%202"
    assert KEYS.consumers_of("/prod/timeline/consumers/b1/seven") is None


def test_values_are_for_people() -> None:
    value = json.loads(records.consumers_value("departures", [b"w%03d" % number for number in range(200)]))
    assert value["format"] == 1 and value["topic"] == "departures" and value["healthy"] == 200
    assert value["consumers"][:2] == ["w000", "w001"] and len(value["consumers"]) == records.IDS_SHOWN
    assert json.loads(records.broker_value(B1, "s")) == {
        "format": 1, "address": "10.0.0.1:9000", "version": "1.2", "session": "s",
    }  # fmt: skip


def test_what_is_written_at_once_is_less_than_etcd_takes_whatever_consumers_call_themselves() -> None:
    ids = [b"%d" % at + b"\x01" * 253 for at in range(60)]
    value = records.consumers_value("t" * 255, ids)
    assert MOST_AT_ONCE * (len(value.encode()) + 1_000) < 1_500_000
    assert records.read_consumers(value.encode()) == 60


def test_unknown_fields_are_left_alone() -> None:
    assert records.read_consumers(b'{"format": 1, "healthy": 3, "later": {}}') == 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested|not JSON"),
        (b"[]", 'no "format"'),
        (b"{}", 'no "format"'),
        (b'{"format": 2, "healthy": 1}', "format 2, and this version reads 1"),
        (b'{"format": 1, "healthy": -1}', "no count"),
        (b'{"format": 1, "healthy": true}', "no count"),
    ],
)
def test_values_that_cannot_be_read_say_why(value: bytes, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        records.read_consumers(value)


@pytest.mark.parametrize("value", [b"mine", b'{"format": 2, "cluster": "9f"}', b'{"format": 1}'])
def test_a_prefix_of_another_version_is_refused(value: bytes) -> None:
    with pytest.raises(MembershipRefused, match=r"another version of Timeline, or not Timeline's .*prefix of its own"):
        records.read_cluster(value, KEYS.cluster)


def test_a_listing_says_who_is_there_and_what_they_host() -> None:
    made = snapshot(broker(B1), broker(B2), consumers(B2, 7, 3), EtcdEntry("/prod/timeline/later/x", b"?", 1, 0))
    assert list(made.members()) == [B1, B2] and made.hosting() == {7: {"b/ 2": 3}}


def test_what_changed_is_enough_while_nothing_was_deleted() -> None:
    made = snapshot(broker(B1), consumers(B1, 7, 3))
    assert made.update(Listing([broker(B2, 2), consumers(B1, 7, 4, 3)], 3, 3))
    assert list(made.members()) == [B1, B2] and made.hosting() == {7: {"b1": 4}} and made.revision == 3
    assert made.update(Listing([], 9, 3)) and made.revision == 9


@pytest.mark.parametrize(
    "listing",
    [
        Listing([], 2, 1),
        Listing([broker(B2, 2)], 2, 2),
        Listing([], 0, 2),
    ],
    ids=["one deleted", "one deleted, one new", "another etcd"],
)
def test_what_does_not_add_up_has_to_be_read_again(listing: Listing) -> None:
    made = snapshot(broker(B1), consumers(B1, 7, 3))
    assert not made.update(listing)
    assert list(made.members()) == [B1]


def test_what_is_read_again_and_is_the_same_is_not_looked_into_again() -> None:
    entries = [broker(B1), broker(B2), consumers(B1, 7, 3), consumers(B2, 7, 1), consumers(B2, 8, 1)]
    made = snapshot(*entries)
    before = made.hosting()
    made.read(Listing([entries[0], broker(B2, 5), *entries[2:4], consumers(B2, 9, 2, 6)], 6, 5))
    after = made.hosting()
    assert after == {7: {"b1": 3, "b/ 2": 1}, 9: {"b/ 2": 2}} and after[7] is before[7]
    made.read(Listing([entries[0], entries[2]], 7, 2))
    assert list(made.members()) == [B1] and made.hosting() == {7: {"b1": 3}} and made.revision == 7
    assert before == {7: {"b1": 3, "b/ 2": 1}, 8: {"b/ 2": 1}}


def test_an_entry_that_cannot_be_read_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bad = EtcdEntry(KEYS.broker("b1"), b'{"format": 9}', 2, 5)
    made = snapshot(broker(B1), consumers(B1, 7, 1))
    assert made.update(Listing([bad, EtcdEntry(KEYS.consumers("b1", 7), b"?", 2, 5)], 2, 2))
    assert made.update(Listing([EtcdEntry(bad.key, bad.value, 3, 5)], 3, 2))
    assert not made.members() and made.hosting() == {}
    assert [record.getMessage() for record in caplog.records if "brokers" in record.getMessage()] == [
        "/prod/timeline/brokers/b1 in etcd is left out: it has format 9, and this version reads 1"
    ]
    assert made.update(Listing([broker(B1, 4)], 4, 2)) and list(made.members()) == [B1]


def test_who_may_need_a_moment_to_come_back_is_believed_in() -> None:
    members, hosting = with_lingering([B1], {7: {"b1": 1}}, [B1, B2], {7: {"b1": 5, "b/ 2": 2}, 8: {"b/ 2": 1}})
    assert list(members) == [B1, B2] and hosting == {7: {"b1": 1, "b/ 2": 2}, 8: {"b/ 2": 1}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"address": "nowhere"}, "an address is host:port"),
        ({"address": "x" * 5_000 + ":1"}, "is no host"),
        ({"address": "10.0.0.1:0"}, "nobody can reach port 0"),
        ({"version": "v" * 5_000}, "up to 255 printable bytes"),
        ({"version": "\ud800"}, "version is no text"),
    ],
)
def test_a_broker_that_cannot_be_told_to_drivers_is_left_out(fields: dict[str, str], said: str) -> None:
    """A frame with such an address is refused by whoever reads it, and all brokers would send it to all drivers."""
    good = {"format": 1, "address": "10.0.0.1:9000", "version": "1.2", "session": "s"}
    made = snapshot(broker(B1), EtcdEntry(KEYS.broker("evil"), json.dumps(good | fields).encode(), 1, 0))
    assert list(made.members()) == [B1]
    with pytest.raises(Unreadable, match=said):
        records.read_broker("evil", json.dumps(good | fields).encode())
    assert records.read_broker("b2", json.dumps(good | {"address": ""}).encode())[0].address == ""


def test_counts_and_keys_that_no_reckoning_takes_are_left_out() -> None:
    """Who deals what is reckoned from counts in 64 bits, by every broker, while producers wait."""
    much = [
        EtcdEntry(KEYS.consumers("evil", 7), b'{"format": 1, "healthy": %d}' % many, 1, 0) for many in (10**18, 10**30)
    ]
    deep = EtcdEntry("/prod/timeline/consumers/evil/" + "9" * 5_000, b'{"format": 1, "healthy": 1}', 1, 0)
    for one in (*much, deep):
        assert snapshot(broker(B1), consumers(B1, 7, 1), one).hosting() == {7: {"b1": 1}}
    buckets = 4096
    dealt = assign(7, buckets, {"b1": 1, "b2": records.MOST_CONSUMERS, "b3": records.MOST_CONSUMERS})
    assert min(len(dealt.of("b2")), len(dealt.of("b3"))) > buckets // 3
