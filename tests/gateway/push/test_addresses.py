"""Webhooks reach public addresses alone, in whatever form a private one is written, and whenever a name changes."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path

import pytest

from tests.gateway.push.receiver import Receiver, always
from tests.security.certificates import Authority
from timeline.errors import Invalid
from timeline.gateway.push import sender as sender_module
from timeline.gateway.push.addresses import REFUSED, AddressGuard, AddressRefused, host_of
from timeline.gateway.push.sender import Sender, Unanswered

INSIDE = [
    # Plain, and as this machine's look-up reads them: decimal, octal, hexadecimal, short, with a trailing dot.
    "http://127.0.0.1/", "http://127.1/", "http://127.0.1/", "http://2130706433/", "http://0177.0.0.1/",
    "http://0x7f.0.0.1/", "http://0x7f000001/", "http://017700000001/", "http://127.0.0.1:8080/", "http://0/",
    "http://0.0.0.0/", "http://localhost/", "http://LOCALHOST/", "http://127.8.9.10/",
    # Private, carrier-grade NAT, link-local with the metadata of clouds, and what is nobody's.
    "http://10.0.0.1/", "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.1.1/", "http://3232235777/",
    "http://100.64.0.1/", "http://100.100.100.200/", "http://169.254.169.254/latest/meta-data/", "http://2852039166/",
    "http://0xa9fea9fe/", "http://0251.0376.0251.0376/", "http://169.254.170.2/", "http://168.63.129.16/",
    "http://192.0.0.192/", "http://192.0.2.7/", "http://198.18.0.1/", "http://198.51.100.1/", "http://203.0.113.9/",
    "http://192.88.99.1/", "http://224.0.0.1/", "http://240.0.0.1/", "http://255.255.255.255/",
    # IPv6: loopback, unspecified, mapped and compatible IPv4, NAT64, 6to4, Teredo, ISATAP, private, link-local.
    "http://[::1]/", "http://[::]/", "http://[0:0:0:0:0:0:0:1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
    "http://[::ffff:8.8.8.8]/", "http://[::127.0.0.1]/", "http://[64:ff9b::10.0.0.1]/", "http://[64:ff9b::808:808]/",
    "http://[64:ff9b:1::a00:1]/", "http://[2002:7f00:1::]/", "http://[2001:0:7f00:1::]/",
    "http://[2600::5efe:10.0.0.1]/", "http://[2600::200:5efe:10.0.0.1]/", "http://[fd00:ec2::254]/", "http://[fc00::1]/",
    "http://[fe80::1]/", "http://[fec0::1]/", "http://[ff02::1]/", "http://[2001:db8::1]/", "http://[3fff::1]/",
    "http://[100::1]/", "http://[5f00::1]/", "http://[4000::1]/",
]  # fmt: skip
UNFIT = [
    "ftp://example.com/", "file:///etc/passwd", "gopher://127.0.0.1/", "unix:///run/docker.sock", "//127.0.0.1/",
    "http://user@example.com/", "http://user:word@127.0.0.1/", "http://example.com@127.0.0.1/", "http://@127.0.0.1/",
    "http://127%2e0%2e0%2e1/", "http://%31%32%37.0.0.1/", "http://①②⑦.0.0.1/", "http://example.com\\@127.0.0.1/",
    "http://127.0.0.1\t/", "http://exa mple.com/", "http://example.com\r\nHost: a/", "http://[::1/", "http://[fe80::1%25lo]/",
    "http://a:99999/", "http://a,127.0.0.1/", "http://127.0.0.1#@example.com/", "http:///x", "http://*/", "",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "169.253.1.1", "2606:4700::1111", "2001:4860:4860::8888"]


@pytest.mark.parametrize("url", INSIDE)
async def test_no_form_of_an_inner_address_is_reached(url: str) -> None:
    with pytest.raises(AddressRefused, match=r"webhooks must not go to .*--push-allow"):
        await AddressGuard().permitted(*host_of(url))


@pytest.mark.parametrize("url", UNFIT)
async def test_what_is_no_plain_url_is_refused_before_any_look_up(url: str) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{host} was looked up")

    with pytest.raises(Invalid, match="push_url"):
        await AddressGuard((), never).permitted(*host_of(url))


@pytest.mark.parametrize("host", ["127.0.0.1.", "localhost.", "2130706433.", "no-such-host.invalid"])
async def test_a_trailing_dot_reaches_nothing(host: str) -> None:
    with pytest.raises((AddressRefused, OSError)):
        await AddressGuard().permitted(*host_of(f"http://{host}/"))


@pytest.mark.parametrize("address", PUBLIC)
async def test_public_addresses_are_permitted(address: str) -> None:
    url = f"https://[{address}]/x" if ":" in address else f"https://{address}/x"
    assert await AddressGuard().permitted(*host_of(url)) == (address,)


def test_each_refused_network_is_refused_from_its_first_to_its_last_address() -> None:
    guard = AddressGuard()
    for network, _ in REFUSED:
        found = ip_network(network)
        for address in (found[0], found[-1]):
            assert guard.refusal(str(address))


def test_what_is_no_address_is_refused() -> None:
    assert AddressGuard().refusal("localhost") == "'localhost' is no address"


async def test_a_name_that_changes_its_address_is_judged_anew_and_pinned_to_what_was_judged() -> None:
    """Rebinding: the caller connects to what it was told, and each look-up is judged."""
    answers = [["8.8.8.8"], ["127.0.0.1"], ["10.0.0.1", "1.1.1.1", "::1"], []]

    async def rebinding(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("example.com", 8443)
        return answers.pop(0)

    guard, url = AddressGuard((), rebinding), "https://example.com:8443/hook"
    assert await guard.permitted(*host_of(url)) == ("8.8.8.8",)
    with pytest.raises(AddressRefused, match=r"127\.0\.0\.1 is loopback"):
        await guard.permitted(*host_of(url))
    assert await guard.permitted(*host_of(url)) == ("1.1.1.1",)
    with pytest.raises(AddressRefused, match="it has no address"):
        await guard.permitted(*host_of(url))


async def test_the_connection_goes_to_the_address_that_was_judged() -> None:
    """The name is looked up once, by the guard. A second look-up of this one would fail."""
    receiver = Receiver(always(204))
    await receiver.start()
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    sender = Sender(f"http://hook.invalid:{receiver.port}/", AddressGuard(["127.0.0.0/8"], rebinding), 1)
    try:
        for _ in range(2):
            assert (await sender.post([("webhook-id", "a")], b"payload", 10_000)).status == 204
    finally:
        await sender.close()
        await receiver.stop()
    assert asked == ["hook.invalid"]
    bounds = sender._session.timeout
    assert bounds.total is bounds.sock_connect is bounds.sock_read is None, "a push_timeout may be an hour"
    assert {request.headers["Host"] for request, _ in receiver.requests} == {f"hook.invalid:{receiver.port}"}


@pytest.mark.slow
async def test_an_address_that_never_answers_does_not_use_up_the_time_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its queue of connections is full, so the system drops what comes."""
    monkeypatch.setattr(sender_module, "CONNECT_S", 0.2)
    receiver = Receiver(always(204))
    await receiver.start()

    async def both(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    sender = Sender(f"http://hook.invalid:{receiver.port}/", AddressGuard(["127.0.0.0/8"], both), 1)
    silent = socket.socket()
    silent.bind(("127.0.0.2", receiver.port))
    silent.listen(0)
    waiting = [socket.socket() for _ in range(3)]
    try:
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        assert (await sender.post([("webhook-id", "a")], b"payload", 100_000)).status == 204
        monkeypatch.setattr(sender_module, "CONNECT_S", 1_000.0)
        assert (await sender.post([("webhook-id", "b")], b"payload", 100_000)).status == 204, "it is tried first now"
    finally:
        await sender.close()
        await receiver.stop()
        for one in (silent, *waiting):
            one.close()


@pytest.mark.slow
async def test_a_connection_that_never_came_is_told_from_an_answer_that_never_came() -> None:
    """The first concerns all topics of the host, the second one receiver alone."""

    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        sender = Sender(f"http://hook.invalid:{port}/", AddressGuard(["127.0.0.0/8"], here), 1)
        try:
            with pytest.raises(Unanswered) as unread:  # the system connects, and nobody reads
                await sender.post([("webhook-id", "a")], b"payload", 50)
            for one in waiting:  # now the queue of connections is full, and the system drops what comes
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            with pytest.raises(Unanswered) as unconnected:
                await sender.post([("webhook-id", "b")], b"payload", 400)
        finally:
            await sender.close()
            for one in waiting:
                one.close()
    assert unread.value.reached and not unconnected.value.reached
    assert (str(unread.value), str(unconnected.value)) == ("no answer within 50ms", "no connection within 400ms")


TLS_POST = """
import asyncio, sys
from timeline.gateway.push.addresses import AddressGuard
from timeline.gateway.push.sender import Sender, Unanswered

async def here(host, port):
    return ["127.0.0.1"]

async def main():
    sender = Sender(sys.argv[1], AddressGuard(["127.0.0.0/8"], here), 1)
    try:
        print((await sender.post([("webhook-id", "a")], b"payload", 20_000)).status)
    except Unanswered as why:
        print(why)
    finally:
        await sender.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "known", "said"),
    [("hook.test", True, "204"), ("other.test", True, "certificate"), ("hook.test", False, "certificate")],
)
async def test_a_receiver_with_tls_must_have_a_certificate_for_the_urls_host(
    tmp_path: Path, host: str, known: bool, said: str
) -> None:
    """The connection goes to an address, and the certificate is that of the name."""
    authority, another = Authority(tmp_path, "known"), Authority(tmp_path, "another")
    pair = authority.issue("receiver", "hook.test")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    receiver = Receiver(always(204))
    await receiver.start(context)
    try:
        sent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TLS_POST, f"https://{host}:{receiver.port}/",
            env=os.environ | {"SSL_CERT_FILE": (authority if known else another).ca}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told, _ = await sent.communicate()
    finally:
        await receiver.stop()
    assert said in told.decode().lower() and len(receiver.requests) == (said == "204")


async def test_allowed_networks_are_reached_and_no_others() -> None:
    guard = AddressGuard(["127.0.0.0/8", "fd00::/8", "10.1.0.0/16"])
    assert await guard.permitted(*host_of("http://0x7f.1:9/")) == ("127.0.0.1",)
    assert await guard.permitted(*host_of("http://[fd12::1]/")) == ("fd12::1",)
    assert await guard.permitted(*host_of("http://10.1.2.3/")) == ("10.1.2.3",)
    for url in ("http://10.2.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[2002:7f00:1::]/"):
        with pytest.raises(AddressRefused):
            await guard.permitted(*host_of(url))


@pytest.mark.parametrize("network", ["10.0.0.1/8", "10.0.0.0/33", "private", "", "10.0.0.0/8 "])
def test_a_wrong_network_is_named(network: str) -> None:
    with pytest.raises(Invalid, match="--push-allow takes networks such as"):
        AddressGuard([network])


def test_the_port_follows_from_the_scheme() -> None:
    assert host_of("http://a.example/") == ("a.example", 80)
    assert host_of("https://A.example/") == ("a.example", 443)
    assert host_of("https://[2001:db8::1]:8/") == ("2001:db8::1", 8)
