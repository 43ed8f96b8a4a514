"""Topics that move house between kinds of store, on real servers: there and back again, nothing is different."""

from __future__ import annotations

import pytest

from tests.cli.test_copy import everything, furnished
from tests.servers.fixture import Running
from tests.storage_plugins.test_unknown_outcomes import KINDS, kind_of, store_at
from timeline.storage_plugins.conformance.trial import T0, Trial
from timeline.storage_plugins.copying import TopicCopy, topic_of
from timeline.storage_plugins.memory import MemoryStore

pytestmark = pytest.mark.servers

KEPT = ("birth", "groups", "tags", "payload_sum", "payloads", "headers", "expires_ms", "dead", "died_ms")


@pytest.mark.parametrize("name", KINDS)
async def test_there_and_back_again(servers: Running, name: str) -> None:
    url = servers.url(kind_of(name))
    async with (
        Trial(MemoryStore) as first,
        Trial(lambda: store_at(name, url)) as there,
        Trial(MemoryStore) as back,
    ):
        topic = await furnished(first)
        one = TopicCopy(first.store, there.store, topic, lambda: T0 + 100)
        await one.prepare()
        done = await one.run()
        there._topics.append(await topic_of(there.store, topic.name))
        assert (done.copied, done.dead, done.failed) == (2_502, 40, 0), done.reasons
        assert (await one.compare()).same
        other = TopicCopy(there.store, back.store, there._topics[-1], lambda: T0 + 100)
        await other.prepare()
        assert (await other.run()).copied == 2_502 and (await other.compare()).same
        before, after = await everything(first.store, topic), await everything(back.store, other._into)
        assert before.keys() == after.keys()
        assert [id for id, row in before.items() if any(row[field] != after[id][field] for field in KEPT)] == []
