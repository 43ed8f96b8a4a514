"""Finding a membership by its URL, and the cluster of one."""

from __future__ import annotations

import pytest

from timeline.errors import Invalid
from timeline.sync import Member, MembershipChange, make_membership


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("locall://", "sync 'locall' is not known; use one of etcd://, local://. Did you mean local://?"),
        ("local", "sync 'local' is not known; use one of etcd://, local://. Did you mean local://?"),
        ("zookeeper://h1", "sync 'zookeeper' is not known; use one of etcd://, local://."),
        ("", "sync '' is not known"),
        ("etcd:u:secret", "sync 'etcd' is not known; use one of etcd://, local://. Did you mean etcd://?"),
        ("local://h1:2379", "local:// takes nothing behind it, not 'h1:2379'"),
    ],
)
def test_a_url_that_names_no_membership_is_refused_with_what_would(url: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        make_membership(url)
    assert refused.value.reason.startswith(said)


async def test_one_broker_by_itself_is_the_only_member_and_deals_every_bucket() -> None:
    membership, changes = make_membership("local://"), list[MembershipChange]()
    membership.on_change(changes.append)
    assert membership.members() == ()
    await membership.start(Member("b1", "127.0.0.1:9000"), "c0ffee")
    assert membership.members() == (Member("b1", "127.0.0.1:9000"),)
    assert membership.buckets(7, 64) is None
    await membership.stop()
    assert membership.members() == () and changes == []
