"""The proxy forwards, and loses an exchange before the server has seen it or after the server has answered it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.servers.proxy import Proxy


class Echo:
    """A server that repeats each line, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.seen.append(line)
                writer.write(line)
                await writer.drain()
        except ConnectionError:
            return  # cut off, which is what these tests do
        finally:
            writer.close()


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[Echo, Proxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        yield echo, proxy


async def asked(proxy: Proxy, *lines: bytes) -> list[bytes]:
    """What one connection is answered, line by line, until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    answers: list[bytes] = []
    try:
        for line in lines:
            writer.write(line)
            await writer.drain()
            answer = await reader.readline()
            if not answer:
                break
            answers.append(answer)
    except ConnectionError:
        answers.append(b"reset")
    writer.close()
    return answers


async def test_forwards_and_counts() -> None:
    async with echo_behind_proxy() as (_, proxy):
        assert await asked(proxy, b"a\n", b"b\n") == [b"a\n", b"b\n"]
        assert (proxy.exchanges, proxy.cuts) == (2, 0)


@pytest.mark.parametrize(("when", "seen"), [("before", [b"a\n"]), ("after", [b"a\n", b"b\n"])])
async def test_cuts_one_exchange(when: str, seen: list[bytes]) -> None:
    async with echo_behind_proxy() as (echo, proxy):
        proxy.cut_once(2, when)  # type: ignore[arg-type]
        assert await asked(proxy, b"a\n", b"b\n", b"c\n") == [b"a\n", b"reset"]
        assert echo.seen == seen
        assert await asked(proxy, b"d\n") == [b"d\n"]
        assert proxy.cuts == 1


async def test_cuts_every_third_until_told_otherwise() -> None:
    async with echo_behind_proxy() as (_, proxy):
        proxy.cut_every(3, "after")
        assert await asked(proxy, b"1\n", b"2\n", b"3\n") == [b"1\n", b"2\n", b"reset"]
        assert await asked(proxy, b"4\n", b"5\n", b"6\n") == [b"4\n", b"5\n", b"reset"]
        proxy.leave_alone()
        assert len(await asked(proxy, *[b"x\n"] * 7)) == 7


@pytest.mark.slow
async def test_cuts_about_every_third_never_at_equal_distances() -> None:
    passed = []
    for _ in range(2):
        async with echo_behind_proxy() as (_, proxy):
            proxy.cut_about_every(3, "after")
            passed.append([len(await asked(proxy, *[b"x\n"] * 6)) for _ in range(20)])
    assert passed[0] == passed[1]  # the cut one counts
    assert set(passed[0]) == {1, 2, 3, 4, 5}


async def test_a_server_that_is_down_ends_the_connection() -> None:
    async with echo_behind_proxy() as (_, proxy):
        proxy.server_port = 1
        assert await asked(proxy, b"a\n") in ([], [b"reset"])


async def test_url_by_way_of_the_proxy() -> None:
    async with echo_behind_proxy() as (_, proxy):
        assert proxy.url("redis://u:p@127.0.0.1:6379/0?a=b") == f"redis://u:p@127.0.0.1:{proxy.port}/0?a=b"


async def test_a_delayed_answer_comes() -> None:
    async with echo_behind_proxy() as (_, proxy):
        proxy.delay_s = 0.01
        assert await asked(proxy, b"a\n", b"b\n") == [b"a\n", b"b\n"]


async def test_cutting_all_ends_a_delayed_connection_at_once() -> None:
    async with echo_behind_proxy() as (_, proxy):
        proxy.delay_s = 3_600.0
        _, writer = connection = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a\n")
        while proxy.exchanges == 0:
            await asyncio.sleep(0)
        proxy.cut_all()
        with pytest.raises(ConnectionError):
            await connection[0].readexactly(1)
        writer.close()
