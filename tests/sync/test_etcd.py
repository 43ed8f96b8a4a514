"""Membership through a real etcd of one member: what it holds there, and what it makes of what others do to that."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.process import free_port
from tests.sync.etcd_brokers import CLUSTER, Watched, broker_process, joined, told
from timeline.sync import JoinState, Member, MembershipRefused, make_membership
from timeline.sync.etcd.client import Client, EtcdLeaseLost, EtcdLocation, EtcdTrouble

pytestmark = pytest.mark.servers

LATE = re.compile("DEADLINE_EXCEEDED|UNAVAILABLE")


@pytest.fixture
def etcd(servers: Running) -> EtcdServer:
    return servers.server(EtcdServer)


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(6)


@pytest.fixture
def url(etcd: EtcdServer, prefix: str) -> str:
    return f"{etcd.url}/{prefix}?ttl=3s"


def printed(etcd: EtcdServer, prefix: str) -> dict[str, dict[str, object]]:
    """What `etcdctl get --prefix` shows: a line for each key, a line for its value."""
    lines = etcd.etcdctl("get", "--prefix", f"/{prefix}/").splitlines()
    return {
        key.removeprefix(f"/{prefix}/"): json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)
    }


async def test_people_can_read_what_etcd_holds(etcd: EtcdServer, url: str, prefix: str) -> None:
    async with joined(url, "b1", "b/2") as (one, two):
        await told(one, two)
        found = printed(etcd, prefix)
        session = found["brokers/b1"].pop("session")
        assert isinstance(session, str) and found["brokers/b%2F2"]["session"] != session
        assert found["cluster"] == {"format": 1, "cluster": CLUSTER, "by": found["cluster"]["by"]}
        assert found["brokers/b1"] == {"format": 1, "address": "b1.example:9000", "version": "1.0"}
        assert found["consumers/b%2F2/7"] == {"format": 1, "topic": "departures", "healthy": 1, "consumers": ["b/2"]}
        assert found["topics"] == {"format": 1, "by": "b1"}
        assert len(found) == 6
    assert set(printed(etcd, prefix)) == {"cluster", "topics"}


async def test_what_settles_is_told_once_and_what_has_not_changed_never(
    etcd: EtcdServer, url: str, prefix: str
) -> None:
    async with joined(url, "b1", "b2") as (one, two):

        def written() -> int:
            answer = json.loads(etcd.etcdctl("get", f"/{prefix}/consumers/b1/7", "-w", "json"))
            return int(answer["kvs"][0]["version"])

        before = written()
        for count in range(1, 500):
            one.host(*(b"%d" % number for number in range(count)))
        await two.until(lambda: two.membership.hosting(7) == {"b1": 499, "b2": 1}, "all of them")
        assert written() - before < 50
        one.host(*(b"%d" % number for number in range(499)))
        await told(one, two)
        after = written()
        one.host(*(b"%d" % number for number in range(499)))
        one.membership.host(8, "arrivals", [b"x"])
        await two.until(lambda: two.membership.hosting(8) == {"b1": 1}, "the other topic")
        assert written() == after


async def test_more_keys_than_one_transaction_takes(url: str) -> None:
    async with joined(url, "b1", "b2") as (one, two):
        for uid in range(1000, 1350):
            one.membership.host(uid, f"topic {uid}", [b"x"])
        await two.until(lambda: all(two.membership.hosting(uid) for uid in range(1000, 1350)), "350 topics")
        for uid in range(1000, 1350):
            one.membership.host(uid, f"topic {uid}", [])
        await two.until(lambda: not any(two.membership.hosting(uid) for uid in range(1000, 1350)), "none of them")


async def test_a_broker_that_is_killed_is_missed_and_may_come_back_at_once(url: str) -> None:
    async with joined(url, "b1") as (one,):
        killed = broker_process(url, "b2")
        try:
            await one.until(lambda: set(one.owners()) == {"b1", "b2"}, "both deal")
            killed.send_signal(signal.SIGKILL)
            again = Watched(url, "b2")
            again.host(b"b2")
            starting = asyncio.ensure_future(again.start())
            await again.until(
                lambda: again.membership.state.reason.startswith("etcd has a broker called 'b2'"), "waits"
            )
            assert again.membership.state.join_state is JoinState.JOINING
            await starting
            await one.until(lambda: again.member in one.membership.members(), "the one with the new address")
            await again.membership.stop()
        finally:
            killed.kill()
            killed.communicate()


async def test_a_broker_that_is_stopped_past_its_lease_joins_again(url: str) -> None:
    async with joined(url, "b1") as (one,):
        stopped = broker_process(url, "b2")
        try:
            await one.until(lambda: set(one.owners()) == {"b1", "b2"}, "both deal")
            stopped.send_signal(signal.SIGSTOP)
            await one.until(lambda: set(one.owners()) == {"b1"}, "its buckets are taken over")
            stopped.send_signal(signal.SIGCONT)
            await one.until(lambda: set(one.owners()) == {"b1", "b2"}, "both deal")
        finally:
            stopped.kill()
            stopped.communicate()


def entry(etcd: EtcdServer, key: str) -> dict[str, str | int]:
    """A key as it stands: value, lease and revisions; empty when it is not there."""
    found = json.loads(etcd.etcdctl("get", key, "-w", "json")).get("kvs", [{}])[0]
    return {**found, "value": base64.b64decode(found.get("value", "")).decode()}


async def test_entries_that_are_changed_or_deleted_by_hand_are_mended(etcd: EtcdServer, url: str, prefix: str) -> None:
    async with joined(url, "b1", "b2") as (one, two):
        for key in (f"/{prefix}/consumers/b1/7", f"/{prefix}/brokers/b1"):
            before = entry(etcd, key)
            etcd.etcdctl("del", key)
            while entry(etcd, key).get("create_revision", 0) in (0, before["create_revision"]):
                await told(two, one)  # a way to wait: each is a round through etcd
            assert entry(etcd, key)["value"] == before["value"]
        etcd.etcdctl("put", f"/{prefix}/consumers/b1/7", '{"format": 1, "healthy": 9}')
        while "b1" not in str(entry(etcd, f"/{prefix}/consumers/b1/7")["value"]):
            await told(two, one)
        await two.until(lambda: two.membership.hosting(7) == {"b1": 1, "b2": 1}, "as it was")
        await two.until(lambda: two.names() == ["b1", "b2"], "both there")


async def test_a_brokers_entry_that_is_written_again_by_hand_is_replaced(
    etcd: EtcdServer, url: str, prefix: str
) -> None:
    """With its very own value, but bound to no lease, as who puts back what `etcdctl get` showed does."""
    async with joined(url, "b1", "b2") as (one, two):
        key = f"/{prefix}/brokers/b1"
        value = str(entry(etcd, key)["value"])
        etcd.etcdctl("put", key, value)
        while not entry(etcd, key).get("lease"):
            await told(two, one)
        assert entry(etcd, key)["value"] == value
        await two.until(lambda: one.member in two.membership.members(), "both there")


async def test_a_lease_that_somebody_revokes_is_replaced(etcd: EtcdServer, url: str, prefix: str) -> None:
    async with joined(url, "b1", "b2") as (one, two):
        before, joining = entry(etcd, f"/{prefix}/brokers/b1")["lease"], len(one.seen)
        etcd.etcdctl("lease", "revoke", f"{before:x}")
        while entry(etcd, f"/{prefix}/brokers/b1").get("lease", before) == before:
            await told(two, one)
        for broker in (one, two):
            await broker.until(lambda at=broker: set(at.owners()) == {"b1", "b2"}, "both deal")  # type: ignore[misc]
        assert ["b1"] not in one.seen[joining:]


async def test_a_name_that_is_lost_to_another_is_asked_for_again(etcd: EtcdServer, url: str, prefix: str) -> None:
    """Somebody who takes a living broker's entry away and its name: it says so, goes on with what it believed, and is
    back once the name is free."""
    async with joined(url, "b1", "b2") as (one, two):
        taken = '{"format": 1, "address": "elsewhere:1", "version": "1.0", "session": "theirs"}'
        etcd.etcdctl("put", f"/{prefix}/brokers/b1", taken)
        await one.until(lambda: one.membership.state.join_state is JoinState.REFUSED, "refused")
        assert "another broker is called 'b1' in this cluster, at elsewhere:1" in one.membership.state.reason
        assert set(one.owners()) == {"b1", "b2"} and one.names() == ["b1", "b2"]
        etcd.etcdctl("del", f"/{prefix}/brokers/b1")
        await one.until(lambda: one.membership.state.join_state is JoinState.JOINED, "joined again")
        await two.until(lambda: one.member in two.membership.members(), "its own address")


async def test_values_of_a_later_version_are_left_out_and_a_prefix_of_one_refused(
    etcd: EtcdServer, url: str, prefix: str
) -> None:
    etcd.etcdctl("put", f"/{prefix}/brokers/b9", '{"format": 2, "address": 7}')
    etcd.etcdctl("put", f"/{prefix}/later/b9", "anything")
    async with joined(url, "b1", "b2") as (one, _):
        assert one.names() == ["b1", "b2"]
    etcd.etcdctl("put", f"/{prefix}/cluster", '{"format": 2, "cluster": "9f"}')
    late = make_membership(url)
    with pytest.raises(MembershipRefused, match="of another version of Timeline"):
        await late.start(Member("b3", "h:1"), CLUSTER)


async def test_changes_during_compactions_are_all_told(etcd: EtcdServer, url: str) -> None:
    async with joined(url, "b1", "b2") as (one, two):
        for count in range(2, 6):
            one.host(*(b"%d" % number for number in range(count)))
            await two.until(lambda count=count: two.membership.hosting(7)["b1"] == count, "told")  # type: ignore[misc]
            revision = json.loads(etcd.etcdctl("get", "x", "-w", "json"))["header"]["revision"]
            etcd.etcdctl("compact", str(revision))


async def test_a_watch_from_what_was_compacted_ends_with_the_reason(etcd: EtcdServer, prefix: str) -> None:
    client = Client(EtcdLocation((etcd.endpoint,), prefix), etcd.endpoint, 10.0)
    try:
        for number in range(3):
            client.change({f"/{prefix}/topics": str(number)})
        revision = client.list(f"/{prefix}/").revision
        etcd.etcdctl("compact", str(revision))
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        said: list[str] = []

        def over(why: str) -> None:
            said.append(why)
            loop.call_soon_threadsafe(ended.set)

        client.watch(f"/{prefix}/", revision - 1, lambda: None, over)
        await asyncio.wait_for(ended.wait(), 60)
        assert "compacted" in said[0]
    finally:
        client.close()


def test_a_lease_that_is_over_is_no_lease(etcd: EtcdServer, prefix: str) -> None:
    client = Client(EtcdLocation((etcd.endpoint,), prefix), etcd.endpoint, 10.0)
    try:
        lease = client.grant(60)
        client.keep_alive(lease)
        assert 0 < client.remaining_s(lease) <= 60
        client.revoke(lease)
        client.revoke(lease)
        assert client.remaining_s(lease) < 0
        for use in (lambda: client.keep_alive(lease), lambda: client.create(f"/{prefix}/x", "", lease)):
            with pytest.raises(EtcdLeaseLost):
                use()
    finally:
        client.close()


def test_every_call_has_a_deadline(etcd: EtcdServer, prefix: str) -> None:
    """A member that takes connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        client = Client(EtcdLocation((endpoint,), prefix), endpoint, 0.2)
        try:
            for call in (
                lambda: client.list("/x/"), lambda: client.get("/x"), lambda: client.create("/x", ""),
                lambda: client.grant(5), lambda: client.change({"/x": "y"}), lambda: client.keep_alive(1),
                lambda: client.remaining_s(1), lambda: client.revoke(1),
            ):  # fmt: skip
                with pytest.raises(EtcdTrouble, match=LATE):
                    call()
        finally:
            client.close()
        with pytest.raises(EtcdTrouble, match=LATE):
            Client(EtcdLocation((endpoint,), prefix, "user", "password"), endpoint, 0.2)


def test_a_call_that_is_wrong_in_itself_is_no_refusal_of_the_broker(etcd: EtcdServer, prefix: str) -> None:
    """etcd answers INVALID_ARGUMENT to whoever has to name a user first, and to a call that is wrong."""
    client = Client(EtcdLocation((etcd.endpoint,), prefix), etcd.endpoint, 10.0)
    try:
        with pytest.raises(MembershipRefused, match="asks for a user"):
            client.get("")
        assert client.get(f"/{prefix}/x") is None
        with pytest.raises(EtcdTrouble, match="INVALID_ARGUMENT"):
            client.get("")
    finally:
        client.close()


async def test_a_broker_waits_for_an_etcd_that_is_not_there_yet(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    early = Watched(f"etcd://127.0.0.1:{free_port()},{etcd.endpoint}/p?ttl=3s", "b1")
    starting = asyncio.ensure_future(early.start())
    await early.until(lambda: "does not answer as it should" in early.membership.state.reason, "says what it waits for")
    assert early.membership.state.join_state is JoinState.JOINING and early.names() == []
    try:
        await asyncio.to_thread(etcd.start)
        await starting
        assert early.names() == ["b1"]
    finally:
        await early.membership.stop()
        etcd.stop()


async def test_a_broker_that_waits_for_etcd_can_be_told_to_end() -> None:
    waiting = Watched(f"etcd://127.0.0.1:{free_port()}/p", "b1")
    starting = asyncio.ensure_future(waiting.start())
    await waiting.until(lambda: waiting.membership.state.reason.startswith("etcd at"), "says what it waits for")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert waiting.membership.state.join_state is JoinState.APART


def test_protobuf_stays_as_it_was() -> None:
    """etcd3 is made to load without switching the process to protobuf written in Python, and is nobody else's etcd3."""
    code = (
        "import sys; from google.protobuf.internal import api_implementation as before; kind = before.Type();"
        "from timeline.sync.etcd.client import _ETCD3; from grpc_health.v1 import health_pb2;"
        "assert _ETCD3.etcdrpc.RangeRequest(key=b'x').SerializeToString() == b'\\n\\x01x';"
        "assert not [name for name in sys.modules if name.startswith('etcd3')];"
        "assert health_pb2.HealthCheckRequest(service='x').SerializeToString();"
        "print(kind, before.Type())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROTOCOL_BUFFERS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split()
    assert before == after == "upb"
