"""Membership through an etcd with TLS, client certificates, users and roles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.certificates import Authority
from tests.servers.etcd import EtcdServer
from tests.services import require_service
from tests.sync.etcd_brokers import CLUSTER, Watched, joined, told
from timeline.errors import Invalid
from timeline.sync import JoinState, Member, MembershipRefused, make_membership

pytestmark = pytest.mark.servers

PASSWORD = "s3cr3t-w0rd"


class SecuredEtcd(EtcdServer):
    """With TLS both ways, and, once it runs, the users root and broker; the latter's role has `/mine/`."""

    scheme = "https"

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "pki")
        cert, key = self.authority.issue("server")
        self.own = self.authority.issue("root")
        super().__init__(
            folder,
            *("--cert-file", str(cert), "--key-file", str(key)),
            *("--trusted-ca-file", str(self.authority.ca), "--client-cert-auth"),
        )

    def etcdctl(self, *arguments: str) -> str:
        cert, key = self.own
        return super().etcdctl("--cacert", str(self.authority.ca), "--cert", str(cert), "--key", str(key), *arguments)

    def prepare_users(self) -> None:
        for command in (
            f"user add root:{PASSWORD}", "role add root", "user grant-role root root",
            f"user add broker:{PASSWORD}", "role add brokers",
            "role grant-permission brokers readwrite --prefix=true /mine/", "user grant-role broker brokers",
            "auth enable",
        ):  # fmt: skip
            self.etcdctl(*command.split())


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredEtcd]:
    require_service("etcd")
    etcd = SecuredEtcd(tmp_path_factory.mktemp("secured")).start()
    try:
        etcd.prepare_users()
        yield etcd
    finally:
        etcd.kill()


@pytest.fixture
def tls(secured: SecuredEtcd) -> str:
    """A client's certificate; one without a name in it that is a user's, as etcd takes that for the user."""
    cert, key = secured.authority.issue("somebody")
    return f"ca={secured.authority.ca}&cert={cert}&key={key}&ttl=3s"


async def refused(url: str) -> str:
    with pytest.raises(MembershipRefused) as caught:
        await asyncio.wait_for(make_membership(url).start(Member("b1", "h:1"), CLUSTER), 60)
    return str(caught.value)


async def test_brokers_meet(secured: SecuredEtcd, tls: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"etcd://broker:{PASSWORD}@{secured.endpoint}/mine?{tls}"
    async with joined(url, "b1", "b2") as (one, two):
        await told(one, two)
    assert PASSWORD not in caplog.text


async def test_wrong_credentials_are_refused_with_what_mends_them(secured: SecuredEtcd, tls: str) -> None:
    at = secured.endpoint
    said = await refused(f"etcd://broker:wr0ng@{at}/mine?{tls}")
    assert "refuses user 'broker'" in said and "wr0ng" not in said
    assert "refuses user 'nobody'" in await refused(f"etcd://nobody:{PASSWORD}@{at}/mine?{tls}")
    assert "does not let a broker without user read and write /mine/" in await refused(f"etcd://{at}/mine?{tls}")
    said = await refused(f"etcd://broker:{PASSWORD}@{at}/theirs?{tls}")
    assert "does not let 'broker' read and write /theirs/" in said


async def test_a_user_where_there_are_none_is_refused_and_none_where_there_are_users(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path).start()
    try:
        said = await refused(f"etcd://broker:{PASSWORD}@{etcd.endpoint}/p")
        assert "knows no users: leave user and password out" in said
        for command in (f"user add root:{PASSWORD}", "role add root", "user grant-role root root", "auth enable"):
            etcd.etcdctl(*command.split())
        said = await refused(f"etcd://{etcd.endpoint}/p")
        assert "asks for a user: --sync etcd://user:password@…, or TIMELINE_ETCD_USER" in said
        async with joined(f"etcd://root:{PASSWORD}@{etcd.endpoint}/p", "b1", "b2"):
            pass  # without TLS, too
    finally:
        etcd.kill()


@pytest.mark.parametrize("given", ["", "wrong authority", "no certificate"])
async def test_who_does_not_fit_by_tls_waits_and_says_so(secured: SecuredEtcd, tmp_path: Path, given: str) -> None:
    """What a handshake fails for is not told to the one who failed: it may as well be an etcd that is not ready."""
    strange = Authority(tmp_path, "strange")
    cert, key = secured.authority.issue("somebody")
    query = {
        "": "tls=0",
        "wrong authority": f"ca={strange.ca}&cert={cert}&key={key}",
        "no certificate": f"ca={secured.authority.ca}",
    }[given]
    waiting = Watched(f"etcd://broker:{PASSWORD}@{secured.endpoint}/mine?{query}", "b1")
    starting = asyncio.ensure_future(waiting.start())
    await waiting.until(lambda: waiting.membership.state.reason.startswith(f"etcd at {secured.endpoint}"), "says why")
    assert waiting.membership.state.join_state is JoinState.JOINING and PASSWORD not in waiting.membership.state.reason
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_a_certificate_that_is_missing_is_refused(secured: SecuredEtcd, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"missing.pem' cannot be read"):
        await make_membership(f"etcd://{secured.endpoint}/mine?ca={tmp_path}/missing.pem").start(
            Member("b1", "h:1"), CLUSTER
        )


async def test_a_token_that_etcd_forgot_is_asked_for_again(secured: SecuredEtcd, tls: str) -> None:
    """etcd forgets the tokens it gave when it restarts."""
    url = f"etcd://broker:{PASSWORD}@{secured.endpoint}/mine?{tls}"
    async with joined(url, "b1", "b2") as (one, two):
        secured.kill()
        await asyncio.to_thread(secured.start)
        await told(one, two)
        await told(two, one)
