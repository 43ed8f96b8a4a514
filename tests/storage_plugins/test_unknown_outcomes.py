"""Connections cut before and after every call, on real servers: whatever the outcome was, the history checker finds no
promise broken once each call has been repeated until its answer was definite."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

import pytest

from tests.servers.fixture import Running
from tests.servers.process import Server
from tests.servers.proxy import Proxy, When
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.trial import Trial
from timeline.storage_plugins.contract import Store, StoreUnavailable

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]

SERVERS = {
    "redis": "tests.servers.redis:RedisServer",
    "postgresql": "tests.servers.postgresql:PostgresqlServer",
    "mysql": "tests.servers.mysql:MysqlServer",
    "cockroachdb": "tests.servers.cockroachdb:CockroachServer",
    "cassandra": "tests.servers.cassandra:CassandraServer",
}
"""By the plugin's module, the server that it is tried on."""
STAND_IN = "tests.storage_plugins.cockroach_stand_in"

KINDS = [
    name
    for name, place in SERVERS.items()
    if find_spec(f"timeline.storage_plugins.{name}") and find_spec(place.partition(":")[0])
]
STRIDES = (2, 3, 5, 7)
"""Of the exchanges, about each so many-th is cut: among them every call's first, its last, and its commit."""

MOST_TURNS = 8
BETWEEN = {"cassandra": 24, "mysql": 7, "postgresql": 8, "cockroachdb": 8}
"""What strides are multiplied by. Cassandra's driver exchanges dozens of messages to connect anew, and waits before it
does. On a new connection, a call of MySQL's store is up to a dozen exchanges, and one of PostgreSQL's up to 17: asyncpg
asks for the types of arrays. A caller left alone with cuts that come sooner would never get through."""


FRESH = {"postgresql": "?schema=doubt", "cockroachdb": "?schema=doubt", "mysql": ""}
"""How the URL of a server names a place where there is no schema yet."""


def kind_of(name: str) -> type[Server]:
    module, _, kind = SERVERS[name].partition(":")
    found = getattr(importlib.import_module(module), kind)
    assert issubclass(found, Server)
    return found


def store_at(name: str, url: str) -> Store:
    """The store at `url`; on the server that stands in for CockroachDB, the plugin that says it in its words."""
    return importlib.import_module(STAND_IN).store(url) if name == "cockroachdb" else make_store(url)


@asynccontextmanager
async def crowd_behind_proxy(servers: Running, name: str, seed: int) -> AsyncIterator[tuple[Crowd, Proxy]]:
    """Two brokers' callers on the server, by way of a proxy."""
    url = servers.url(kind_of(name))
    port = servers.server(kind_of(name)).port
    async with Proxy(port) as proxy, Trial(lambda: store_at(name, proxy.url(url))) as trial:
        topic = await trial.topic(buckets=4, max_deliveries=0)
        async with brokers(trial, 2) as stores:
            yield Crowd(trial, topic, stores, seed), proxy
            proxy.leave_alone()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name == "cassandra" else ()) for name in KINDS]
)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_promise_breaks_with_the_connection(servers: Running, name: str, when: When) -> None:
    async with crowd_behind_proxy(servers, name, len(when)) as (crowd, proxy):
        for at, stride in enumerate(STRIDES * MOST_TURNS):
            if at >= len(STRIDES) and proxy.cuts >= 10 and crowd.unknown + crowd.unavailable:
                break  # a store that reads back what became of a write is seldom in doubt
            proxy.cut_about_every(BETWEEN.get(name, 4) * stride, when)
            await crowd.run(6)
        cuts = proxy.cuts
        proxy.leave_alone()
        await crowd.settle_all()
        await crowd.expect_kept(("put", "OK"), ("ack", "OK"), ("move", "OK"))
    assert cuts >= 10 and crowd.unknown + crowd.unavailable > 0, "nothing was cut"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name == "cassandra" else ()) for name in KINDS]
)
async def test_no_promise_breaks_when_the_server_restarts(servers: Running, name: str) -> None:
    """Every connection ends at once, again and again, as in a restart of the server that keeps its data."""
    async with crowd_behind_proxy(servers, name, 9) as (crowd, proxy):
        server = servers.server(kind_of(name))
        await crowd.run(5)
        server.stop()
        server.start()
        await crowd.run(5)
        proxy.cut_all()
        await crowd.run(5)
        await crowd.settle_all()
        await crowd.expect_kept(("put", "OK"), ("ack", "OK"))


@pytest.mark.parametrize("name", FRESH)
async def test_an_opening_is_never_in_doubt(servers: Running, name: str) -> None:
    """Cut after any exchange, those that make the schema among them, it says that it may be repeated, and goes on."""
    server = servers.server(kind_of(name))
    fresh = server.url + FRESH[name]
    async with Proxy(server.port) as proxy:
        for nth in range(1, 300):
            store, cuts = store_at(name, proxy.url(fresh)), proxy.cuts
            proxy.cut_once(nth, "after")
            try:
                await store.open()
            except StoreUnavailable:
                assert proxy.cuts > cuts
            finally:
                await store.close()
            if proxy.cuts == cuts:
                break
    assert 10 < nth < 299, "it opens where no exchange is cut"
