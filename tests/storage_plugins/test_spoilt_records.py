"""Topic records that somebody changed by hand: what cannot be meant is refused with its name and what mends it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from timeline.model import Topic, TopicSettings
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.redis.store import text_of, topic_of

TOPIC = Topic("orders", 7, TopicSettings(), created_ms=1)
SPOILT = [
    ("", "no JSON"),
    ("{", "no JSON"),
    ("[" * 100_000, "no JSON|no object"),
    ("[]", "no object"),
    ('{"buckets": 0}', "buckets"),
    ('{"buckets": "many"}', "buckets"),
    ('{"lease_ms": 1e300}', "lease must be"),
    ('{"paused": 3}', "paused must be true or false"),
    ('{"kind": "cron"}', "kind must be 'timeline'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "said"), SPOILT)
async def test_settings_in_sqlite(tmp_path: Path, settings: str, said: str) -> None:
    url = f"sqlite:///{tmp_path}/timeline.db"
    store = await open_store(url)
    await store.create_topic(TOPIC)
    await store.close()
    with sqlite3.connect(tmp_path / "timeline.db") as connection:
        connection.execute("UPDATE topic SET settings = ?", (settings,))
    connection.close()
    store = await open_store(url)
    with pytest.raises(StoreRefused, match=f"record of topic 'orders' in the store is spoilt: .*({said}).*right there"):
        await store.topics()
    await store.close()


@pytest.mark.parametrize(("settings", "said"), SPOILT[3:])
def test_settings_in_redis(settings: str, said: str) -> None:
    record = json.loads(text_of(TOPIC)) | {"settings": json.loads(settings)}
    with pytest.raises(StoreRefused, match=f"topic 'orders' .* spoilt: .*({said})"):
        topic_of(json.dumps(record).encode())


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"name": "orders", "uid": 1e999}'])
def test_records_in_redis(text: bytes) -> None:
    assert topic_of(text_of(TOPIC)) == TOPIC
    record = json.loads(text_of(TOPIC))
    assert record["uid"] == str(TOPIC.uid)
    assert topic_of(json.dumps(record | {"uid": TOPIC.uid}).encode()) == TOPIC  # of an earlier version
    with pytest.raises(StoreRefused, match="the record of a topic in the store is spoilt"):
        topic_of(text)
