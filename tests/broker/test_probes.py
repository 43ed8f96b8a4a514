"""The HTTP port for metrics and probes: any address, and bounded whoever connects."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.broker.link import Link, broker
from timeline.broker.server import probes
from timeline.config import split_address
from timeline.errors import Invalid


@contextmanager
def probing(link: Link, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """The address of a port that answers for `link`'s broker."""
    made = probes.MetricsPort(listen, link.node.metrics.registry, lambda: link.node.not_ready)
    try:
        yield made.start()
    finally:
        made.stop()


async def ask(address: str, path: str = "/readyz") -> bytes:
    def get() -> bytes:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            said: bytes = answer.read()
            return said

    return await asyncio.to_thread(get)


@pytest.mark.slow
async def test_metrics_are_served_on_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with broker() as link:
        with probing(link, "[::1]:0") as address:
            assert address.startswith("[::1]:")
            assert await ask(address) == b"ready\n"


async def test_an_address_that_cannot_be_meant_is_refused():
    async with broker() as link:
        with pytest.raises(Invalid, match='or "off"'), probing(link, "localhost"):
            pass


@pytest.mark.slow
async def test_a_connection_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(probes._Quiet, "timeout", 0.05)
    async with broker() as link:
        with probing(link) as address, socket.create_connection(split_address(address), timeout=30) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""
            assert await ask(address) == b"ready\n"
    assert "Traceback" not in capfd.readouterr().err


async def test_who_says_a_request_byte_by_byte_gives_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(probes._Quiet, "timeout", 3_600)
    async with broker() as link:
        with probing(link) as address:
            slow = [socket.create_connection(split_address(address), timeout=30) for _ in range(4)]
            assert [await asyncio.to_thread(one.recv, 1) for one in slow[:2]] == [b""] * 2
            slow[3].sendall(b"G")
            assert await ask(address) == b"ready\n"
            assert await asyncio.to_thread(slow[2].recv, 1) == b""
            for one in slow:
                one.close()
