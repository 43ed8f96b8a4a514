"""A primary of PostgreSQL is lost under load and its standby promoted: the store goes on with it and nothing is lost.

Real servers: a primary whose commits wait for a streaming standby, killed with -9 or no longer answering, and the store
opened once by a URL that names both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.servers.postgresql_pair import Pair, asked, open_folder
from tests.servers.proxy import Proxy
from tests.services import require_service
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import Store, StoreUnavailable, StoreUnknown, TagMutation

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.prove]

PATIENCE_S = 60.0
"""What is not over by then hangs; nothing is measured by it."""


@pytest.fixture(scope="module")
def template() -> Iterator[Pair]:
    """What pairs are copied from. It does not run."""
    require_service("postgresql")
    with open_folder() as folder:
        made = Pair(folder)
        try:
            made.start()
        finally:
            made.stop()
        yield made


@pytest.fixture
async def pair(template: Pair) -> AsyncIterator[Pair]:
    """Commits of the primary wait for the standby, which has all of it."""
    with open_folder() as folder:
        made = Pair(folder, template)
        try:
            made.start()
            await made.following()
            yield made
        finally:
            made.stop()


@asynccontextmanager
async def _opened(url: str, **options: int) -> AsyncIterator[Trial]:
    """A store on both, and what to ask it with."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    async with asyncio.timeout(PATIENCE_S), Trial(lambda: make_store(f"{url}?{query}" if query else url)) as trial:
        yield trial


async def _back(*stores: Store) -> None:
    """Returns once each of them works again: what it kept of connections to a primary that is gone is used up."""
    for store in stores:
        while True:
            try:
                await store.check()
            except (StoreUnavailable, StoreUnknown):
                continue
            break


async def _errors(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[type[Any]]:
    """What each of them raises, or answers, all called at once."""
    return [type(found) for found in await asyncio.gather(*(call() for call in calls), return_exceptions=True)]


async def _refused_as_old(trial: Trial, topic: Topic) -> None:
    """Returns once a put is refused because the only server that takes writes was promoted away from."""
    while True:
        with pytest.raises((StoreUnavailable, StoreUnknown)) as refused:
            await trial.put(topic, [b"third"])
        if "is on timeline 1, and another was promoted to 2 since" in refused.value.reason:
            return


async def test_a_crowd_survives_a_failover(pair: Pair) -> None:
    """Workers and producers of two brokers at work while the primary is killed and the standby promoted."""
    async with _opened(pair.url) as trial:
        assert trial.store.capabilities.durable and trial.store.capabilities.survives_failover
        assert not trial.opened.warnings
        topic, before = await trial.topic(buckets=4, max_deliveries=0), await trial.topic()
        await trial.stored(before, named(500))
        async with brokers(trial, 2) as stores:
            crowd = Crowd(trial, topic, stores, 5)
            await crowd.run(10)
            running = asyncio.create_task(crowd.run(40))
            await pair.kill_amid_commits()
            crowd.served.clear()
            await pair.promote()
            crowd.served.set()
            await running
            assert crowd.unknown, "no call met the fail-over"
            await crowd.run(10)
            await crowd.settle_all()
            await crowd.expect_kept(("put", "OK"), ("ack", "OK"), ("move", "OK"), ("cancel", "OK"))
        assert sorted(await trial.everything(before)) == named(500)
        await trial.store.check()


async def test_the_same_call_after_a_failover_gives_the_settled_answer(pair: Pair) -> None:
    """Whether or not the standby has it: calls whose answers are lost with the primary are sent again word for word."""
    async with _opened(pair.url, pool=20) as trial:
        topic = await trial.topic()
        puts = [trial.puts([id]) for id in named(20)]
        calls = [asyncio.create_task(trial.store.put(topic, T0, one)) for one in puts]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        pair.primary.kill()
        first = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in first} <= {Answers, StoreUnavailable, StoreUnknown}
        with pytest.raises(StoreUnavailable, match=r"no host takes writes: .*no server listens there; .*a standby"):
            await trial.store.put(topic, T0, puts[0])
        await pair.promote()
        again = [statuses(await trial.store.put(topic, T0, one))[0] for one in puts]
        for before, after in zip(first, again, strict=True):
            assert after is Status.DUPLICATE or (after is Status.OK and not isinstance(before, Answers))
        assert sorted(await trial.everything(topic)) == named(20)


async def test_what_the_standby_lacks_is_not_said_to_be_done(pair: Pair) -> None:
    """A change that waited in vain for the standby stands on the primary, where the same call sent again meets it: it
    is as doubtful as before, and once the primary is lost it has not been."""
    async with _opened(pair.url, timeout_ms=700) as trial:
        topic = await trial.topic()
        await trial.stored(topic, [b"acked", b"other"])
        await trial.stored(topic, [b"moved", b"moved by tag"], T0 + 50_000, tag=[b"", b"tag"])
        row = (await trial.lease(topic, 1)).rows
        (acked,) = row.ids.tolist()
        pair.standby.kill()
        by_tag = TagMutation(Operation.MOVE, b"tag", b"default", T0, 77, due_ms=T0 + 80_000)
        puts = trial.puts([b"new"])
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: trial.settle(topic, Operation.ACK, row, op=5),
            lambda: trial.mutate(topic, Operation.MOVE, [b"moved"], T0 + 70_000, op=6),
            lambda: trial.store.mutate_tag(topic, T0, by_tag, b"", 10),
            lambda: trial.store.put(topic, T0, puts),
        ]
        assert await _errors(calls) == [StoreUnknown] * 4
        await pair.break_off_waits()
        while acked in (found := await trial.everything(topic)) or b"new" not in found:
            pass  # until all of it is to be seen on the primary
        assert await _errors(calls) == [StoreUnknown] * 4
        pair.primary.kill()
        pair.standby.start().promote()
        await _back(trial.store)
        found = await trial.everything(topic)
        assert acked in found and b"new" not in found
        answers = [await call() for call in calls]
        assert [statuses(one) for at, one in enumerate(answers) if at != 2] == [[Status.OK]] * 3
        assert answers[2].counts == {Status.OK.code: 1}
        found = await trial.everything(topic)
        assert acked not in found and b"new" in found
        assert [found[id]["due_ms"] - T0 for id in (b"moved", b"moved by tag")] == [70_000, 80_000]


@pytest.mark.parametrize("what", ["put", "create a topic"])
async def test_a_wait_for_the_standby_that_somebody_breaks_off_leaves_it_unknown(pair: Pair, what: str) -> None:
    """The server then answers as if all were well."""
    async with _opened(pair.url) as trial:
        topic, more = await trial.topic(), trial.record()
        trial.drop_later(more)
        await trial.stored(topic, [b"l"])
        pair.standby.freeze()
        calling = trial.put(topic, [b"m"]) if what == "put" else trial.store.create_topic(more)
        call = asyncio.ensure_future(calling)
        while not await pair.break_off_waits():
            pass
        with pytest.raises(StoreUnknown, match="the standby may not have this"):
            await call
        pair.standby.thaw()
        await trial.stored(topic, [b"n"])


async def test_a_primary_that_is_silent_is_left(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Its machine is gone without a word, comes back and takes writes again, its name the first in the URL."""
    async with _opened(pair.url, timeout_ms=700) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(50))
        await asyncio.gather(*(trial.store.clock_ms() for _ in range(8)))  # so that several connections are kept
        pair.primary.freeze()
        with pytest.raises(StoreUnknown):
            await trial.put(topic, [b"first"])
        with pytest.raises(StoreUnavailable):  # the other connections are not tried one by one
            await trial.put(topic, [b"first"])
        await pair.promote()
        await trial.stored(topic, [b"first"])
        pair.primary.kill()
        pair.primary.settings = ()  # it waits for no standby any more
        pair.primary.start()
        async with _opened(pair.url) as later:  # as a broker that was started again
            assert sorted(await later.everything(topic)) == sorted([*named(50), b"first"])
            await later.stored(topic, [b"second"])
            assert "Two servers take writes" in caplog.text
            pair.standby.kill()
            for one in (trial, later):
                await _refused_as_old(one, topic)
            pair.standby.start()
            await _back(trial.store, later.store)
            await later.stored(topic, [b"third"])
            assert sorted(await trial.everything(topic)) == sorted([*named(50), b"first", b"second", b"third"])


async def test_an_address_that_goes_back_to_the_old_primary_is_refused(pair: Pair) -> None:
    """One name that moves with the primary, as a virtual address does."""
    async with Proxy(pair.primary.port) as proxy, _opened(proxy.url(pair.primary.url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(5))
        pair.primary.kill()
        await pair.promote()
        proxy.server_port = pair.standby.port
        await _back(trial.store)
        await trial.stored(topic, [b"new"])
        pair.primary.settings = ()
        pair.primary.start()
        proxy.server_port = pair.primary.port
        proxy.cut_all()
        await _refused_as_old(trial, topic)
        proxy.server_port = pair.standby.port
        await trial.stored(topic, [b"third"])
        assert sorted(await trial.everything(topic)) == [*named(5), b"new", b"third"]


async def test_an_asynchronous_standby_loses_what_it_says_it_may(pair: Pair) -> None:
    """What the standby lacks is gone; the store says so before, and goes on with what there is."""
    await asked(pair.primary.url, "ALTER DATABASE postgres SET synchronous_commit = local")
    async with _opened(pair.url) as trial:
        assert trial.store.capabilities.durable and not trial.store.capabilities.survives_failover
        topic = await trial.topic()
        await trial.stored(topic, named(50))
        rows = (await trial.lease(topic, 10)).rows
        await pair.following()
        pair.standby.kill()
        async with brokers(trial, 3) as stores:
            for at, store in enumerate(stores):  # each takes row numbers, which are given out again after the loss
                await store.put(topic, T0, trial.puts(named(3, f"lost {at}")))
            assert set(statuses(await trial.settle(topic, Operation.ACK, rows))) == {Status.OK}
            pair.primary.kill()
            pair.standby.start().promote()
            await _back(*stores)
            assert sorted(await trial.everything(topic)) == named(50)
            for turn in range(3):
                for at, store in enumerate(stores):
                    puts = trial.puts(named(3, f"kept {turn} {at}"))
                    assert set(statuses(await store.put(topic, T0, puts))) == {Status.OK}
            assert len(await trial.everything(topic)) == 50 + 27
            assert set(statuses(await trial.settle(topic, Operation.ACK, rows))) == {Status.OK}
            assert len((await trial.lease(topic)).rows) == 40 + 27
