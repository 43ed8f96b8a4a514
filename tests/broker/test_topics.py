"""Topics: created once, tuned live, dropped for good."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.broker.link import Link, broker, statuses
from tests.broker.machines import TOPIC, Registered, town
from tests.broker.slow import SlowStore
from timeline.broker.catalog import Catalog
from timeline.broker.fairness import LoopScheduler
from timeline.broker.lanes import MeteredStore
from timeline.broker.limits import Limits
from timeline.broker.runtime import Runtime, Tasks
from timeline.clock import Clock
from timeline.errors import NotFound
from timeline.metrics import Metrics
from timeline.model import LeavingReason, Operation, PushSecret, Status, Topic, TopicSettings
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import (
    Deliver,
    Leaving,
    TopicAction,
    TopicList,
    Topics,
    decode_as,
    encode,
)


async def test_topics_are_created_once_and_conflicts_are_named():
    async with broker() as link:
        assert (await link.topic(TopicAction.CREATE)).status == Status.OK.code
        conflict = await link.topic(TopicAction.CREATE, lease_ms=5)
        assert conflict.status == Status.EXISTS.code
        assert "lease" in conflict.detail
        unknown = await link.topic(TopicAction.CREATE, "u", leese_ms=5)
        assert unknown.status == Status.INVALID.code
        assert "lease_ms" in unknown.detail
        fixed = await link.topic(TopicAction.UPDATE, buckets=3)
        assert fixed.status == Status.INVALID.code
        assert (await link.topic(TopicAction.DROP, "nope")).status == Status.NOT_FOUND.code


async def test_a_topic_that_was_tuned_since_is_no_conflict_for_whoever_did_not_ask_for_it():
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, remember_ms=5_000)
        again = await link.topic(TopicAction.CREATE, lease_ms=30_000)
        assert again.status == Status.OK.code
        assert again.topics[0].settings.remember_ms == 5_000
        conflict = await link.topic(TopicAction.CREATE, remember_ms=6_000)
        assert conflict.status == Status.EXISTS.code
        assert "remember is 5s, not 6s: `timeline topic update t --remember 6s` changes it" in conflict.detail
        assert "_ms" not in conflict.detail
        paused = await link.topic(TopicAction.CREATE, remember_ms=0, paused=True)
        assert "`timeline topic update t --remember 0`" in paused.detail
        assert "`timeline topic pause t` changes them" in paused.detail
        fixed = await link.topic(TopicAction.CREATE, buckets=2)
        assert "buckets is 64, not 2: buckets cannot be changed" in fixed.detail
        again = await link.topic(TopicAction.UPDATE, lease_ms=2_000, max_lease_ms=1_000)
        assert "lease 2s is above max_lease 1s: raise max_lease, too" in again.detail


@pytest.mark.parametrize("name", ["a b", "é", "a/b", ".."])
async def test_a_new_name_fits_into_a_url_and_a_shell(name: str) -> None:
    async with broker() as link:
        refused = await link.topic(TopicAction.CREATE, name)
        assert refused.status == Status.INVALID.code
        assert "letters, digits, '.', '_' and '-'" in refused.detail


@pytest.mark.slow
async def test_a_topic_with_a_name_of_older_rules_stays_usable(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    async with broker(url):
        pass
    with closing(sqlite3.connect(tmp_path / "t.db")) as db, db:
        db.execute("UPDATE topic SET name = 'gate é', uid = uid - 1 WHERE name = 't'")
    async with broker(url) as link:
        again = await link.topic(TopicAction.CREATE, "gate é")
        assert (again.status, [topic.name for topic in again.topics]) == (Status.OK.code, ["gate é"])
        assert (await link.topic(TopicAction.UPDATE, "gate é", lease_ms=5_000)).status == Status.OK.code


async def test_a_new_name_is_not_looked_for_among_what_other_brokers_created() -> None:
    store, clock, metrics = Readings(), Clock(), Metrics()
    runtime = Runtime(clock, Limits(), metrics, Tasks(lambda name, error: None), LoopScheduler(clock.monotonic_ms))
    metered = MeteredStore(store, runtime, lambda: None, lambda uid: None)
    await metered.open()
    catalog = Catalog(metered, clock, random.Random(1).getrandbits, lambda before, after, made: None, lambda: False)
    for name in ("a", "b"):
        assert (await catalog.create(name, {})).name == name
    assert store.readings == 0
    await store.create_topic(Topic("gate é", 7, TopicSettings()))
    assert (await catalog.create("gate é", {})).uid == 7


def test_a_broker_that_comes_while_a_name_is_looked_for_holds_up_nobody() -> None:
    """Alone, a broker looks again after 50 ms, and beside another one after a second. A loop that does not rest until
    then would never end here: no time passes in it."""
    with town() as there:

        async def story() -> None:
            catalog = (await there.broker("b1")).node.catalog
            assert await catalog.find("gone") is None
            looking = asyncio.ensure_future(catalog.find("gone"))
            await asyncio.sleep(0)
            assert not looking.done()
            await there.broker("b2")
            assert await looking is None

        there.run(story())


async def test_a_topic_that_changes_under_load_is_changed_for_what_waits() -> None:
    """The store is asked all the time, and so the lane of the topic never ends."""
    store = SlowStore()
    async with broker(store) as link:
        consumer = await link.consume()
        await link.put(["first"])
        first = await consumer.down(Deliver)
        await link.put(["second"])
        second = await consumer.down(Deliver)
        store.hold("settle")
        acks = [asyncio.ensure_future(link.settle(consumer, first, Operation.ACK))]
        await store.arrived("settle")
        assert (await link.topic(TopicAction.UPDATE, remember_ms=3_600_000)).status == Status.OK.code
        acks.append(asyncio.ensure_future(link.settle(consumer, second, Operation.ACK)))
        while link.node.settling.waiting < 2:
            await asyncio.sleep(0)
        store.release("settle")
        assert [statuses(one) for one in await asyncio.gather(*acks)] == [[Status.OK], [Status.OK]]
        assert statuses(await link.put(["second"])) == [Status.DUPLICATE]


def test_a_topic_that_another_broker_made_again_takes_puts_though_nobody_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """etcd is away, or the news is on its way."""
    monkeypatch.setattr(Registered, "topics_changed", lambda membership: None)
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.broker("b2")
            await there.create_topic()
            await there.put([3_600.0], "b1:9000")
            await there.ask(lambda client: client.drop_topic(TOPIC), "b2:9000")
            await there.ask(lambda client: client.create_topic(TOPIC), "b2:9000")
            await there.put([3_600.0], "b1:9000")
            await there.ask(lambda client: client.drop_topic(TOPIC), "b2:9000")
            with pytest.raises(NotFound):
                await there.put([3_600.0], "b1:9000")

        there.run(story())


class Readings(MemoryStore):
    """Counts how often all topics were read."""

    readings = 0

    async def topics(self) -> list[Topic]:
        self.readings += 1
        return await super().topics()


async def test_a_dropped_topic_ends_its_streams_and_its_rows_are_never_seen_again():
    async with broker() as link:
        consumer = await link.consume()
        await link.put(["a"], in_ms=3_600_000)
        await link.topic(TopicAction.DROP)
        leaving = await consumer.down(Leaving)
        assert leaving.reason is LeavingReason.TOPIC_DROPPED
        await link.topic(TopicAction.CREATE)
        assert await link.ids() == []


async def change(link: Link, revision: int, **settings: Any) -> TopicList:
    frame = encode(Topics(TopicAction.UPDATE, "t", settings, revision))
    return decode_as(await link.node.service.unary("Topics", frame), TopicList)


async def test_an_update_of_a_revision_that_stands_no_more_is_told_to_read_again():
    async with broker() as link:
        changed = await change(link, 1, lease_ms=5_000)
        assert (changed.status, changed.topics[0].revision) == (Status.OK.code, 2)
        late = await change(link, 1, lease_ms=6_000)
        assert late.status == Status.EXISTS.code
        assert "at revision 2, not 1" in late.detail and "read it again" in late.detail
        assert link.node.catalog.all()[0].settings.lease_ms == 5_000
        assert (await link.topic(TopicAction.UPDATE, "absent", lease_ms=1)).status == Status.NOT_FOUND.code


async def test_an_update_that_another_broker_overtakes_is_made_on_what_then_stands():
    store = Overtaken()
    async with broker(store) as link:
        store.left = 2
        changed = await link.topic(TopicAction.UPDATE, lease_ms=5_000)
        assert (changed.status, changed.topics[0].settings.lease_ms) == (Status.OK.code, 5_000)
        assert changed.topics[0].settings.max_deliveries == 2, "the other's change stands, too"
        store.left = 2
        late = await change(link, changed.topics[0].revision, lease_ms=6_000)
        assert late.status == Status.EXISTS.code
        store.left = 1_000
        never = await link.topic(TopicAction.UPDATE, lease_ms=7_000)
        assert never.status == Status.EXISTS.code and "keeps changing" in never.detail


async def test_an_update_that_changes_nothing_keeps_the_revision() -> None:
    async with broker() as link:
        told = [(await link.topic(TopicAction.UPDATE, lease_ms=5_000)).topics[0] for _ in range(2)]
        assert told[0] == told[1] and told[0].revision == 2


async def test_an_update_that_changes_nothing_here_still_undoes_what_another_broker_changed() -> None:
    store = MemoryStore()
    store.capabilities = replace(store.capabilities, shared=True)
    async with broker(store) as link:
        (mine,) = (await link.topic(TopicAction.UPDATE, lease_ms=5_000)).topics
        await store.update_topic(replace(mine, settings=replace(mine.settings, lease_ms=9_000)))
        (after,) = (await link.topic(TopicAction.UPDATE, lease_ms=5_000)).topics
        assert (after.settings.lease_ms, after.revision) == (5_000, mine.revision + 2)
        (stored,) = await store.topics()
        assert stored.settings.lease_ms == 5_000


@pytest.mark.slow
async def test_a_setting_that_only_a_newer_broker_knows_is_told_once_and_kept_through_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """While brokers of two versions share a store, an older one must not take away what a newer one has set."""
    file = tmp_path / "a.db"

    def stored() -> dict[str, Any]:
        with closing(sqlite3.connect(file)) as db:
            (text,) = db.execute("SELECT settings FROM topic").fetchone()
        return dict(json.loads(text))

    async with broker(f"sqlite:///{file}") as link:
        store = link.node.store.store
        store.capabilities = replace(store.capabilities, shared=True)
        with closing(sqlite3.connect(file)) as db:
            db.execute("UPDATE topic SET settings = ?", (json.dumps(stored() | {"urgency": {"high": 3}}),))
            db.commit()
        for _ in range(2):
            await link.node.catalog.refresh()
        told = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
        assert told == ['topic \'t\' has settings that only a newer broker knows: {"urgency": {"high": 3}}']
        changed = await link.topic(TopicAction.UPDATE, lease_ms=5_000)
        assert changed.status == Status.OK.code
        assert (stored()["lease_ms"], stored()["urgency"]) == (5_000, {"high": 3})
        assert statuses(await link.put(["a"])) == [Status.OK]


class Overtaken(MemoryStore):
    """Another broker changes a record just before each of the next `left` changes of ours."""

    left = 0

    async def update_topic(self, topic: Topic) -> Topic:
        if self.left:
            self.left -= 1
            (stands,) = await self.topics()
            await super().update_topic(replace(stands, settings=replace(stands.settings, max_deliveries=2 + self.left)))
        return await super().update_topic(topic)


async def secrets(link: Link, action: TopicAction = TopicAction.SECRETS) -> tuple[str, ...]:
    return (await link.topic(action)).secrets


async def test_a_topic_with_a_push_url_has_a_secret_that_no_listing_and_no_log_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("DEBUG")
    async with broker(f"sqlite:///{tmp_path}/a.db") as link:
        assert await secrets(link) == ()
        changed = await link.topic(TopicAction.UPDATE, push_url="https://example.com/hook")
        assert (changed.status, changed.secrets) == (Status.OK.code, ())
        (secret,) = await secrets(link)
        assert secret.startswith("whsec_") and len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32
        listed = await link.topic(TopicAction.LIST, "")
        assert listed.secrets == () and secret not in repr(listed) + repr(link.node.catalog.all())
        await link.topic(TopicAction.UPDATE, push_url="https://example.com/other", lease_ms=5_000)
        await link.node.catalog.refresh()
        assert await secrets(link) == (secret,)
        assert secret not in caplog.text


async def test_both_secrets_of_a_rotation_are_valid_for_a_day():
    async with broker() as link:
        await link.topic(TopicAction.UPDATE, push_url="https://example.com/hook")
        (first,) = await secrets(link)
        second, former = await secrets(link, TopicAction.ROTATE)
        assert former == first != second == (await secrets(link))[0]
        third, former = await secrets(link, TopicAction.ROTATE)
        assert former == second, "never more than two"
        (topic,) = link.node.catalog.all()
        assert [each.until_ms > 0 for each in topic.secrets] == [False, True]
        link.node.catalog._replace(topic, replace(topic, secrets=(topic.secrets[0], PushSecret(second, 1))))
        assert await secrets(link) == (third,), "the former one has ended"


@pytest.mark.parametrize(
    "url",
    [
        "example.com", "//example.com", "ftp://example.com", "javascript:alert(1)", "http://", "https:///path",
        "https://user@example.com", "https://user:word@example.com", "https://@example.com", "http://a:0/",
        "http://a:x/", "http://[::1", "http://a/#x", "http://a b/", "http://a/\n", "http://ä/", "http://a\\b/",
        "http://[fe80::1%25lo]/", "http://127.0.0.1%00.example.com/", "http://%31.example.com/", "http://./", "http://a..b/",
        f"http://{'a' * 64}.example.com/", f"http://{'a.' * 130}com/",
    ],
)  # fmt: skip
async def test_a_push_url_is_checked(url: str):
    async with broker() as link:
        refused = await link.topic(TopicAction.UPDATE, push_url=url)
        assert refused.status == Status.INVALID.code and refused.detail.startswith("push_url")


async def test_a_first_wait_above_the_cap_is_refused():
    async with broker() as link:
        refused = await link.topic(TopicAction.UPDATE, retry_first_ms=2_000, retry_cap_ms=1_000)
        assert refused.detail == "retry_first 2s is above retry_cap 1s: raise retry_cap, too"
        refused = await link.topic(TopicAction.UPDATE, retry_factor_percent=50)
        assert refused.detail == "retry_factor_percent must be a whole number from 100 to 100000, not 50"
