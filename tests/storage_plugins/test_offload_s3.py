"""Payloads in an object store: moto's S3 server, spoken to through s3fs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.s3 import BUCKET, ENVIRONMENT, s3_server
from timeline.model import Operation
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance import run_check
from timeline.storage_plugins.conformance.trial import T0, Trial, named
from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.offload import SHARDS, PayloadGone, PayloadsUnavailable
from timeline.storage_plugins.offload.files import PayloadFiles
from timeline.storage_plugins.offload.store import OffloadingStore

pytestmark = pytest.mark.servers

LARGE = bytes(range(256)) * 20
CHECKS = ("payload_sizes", "put_of_a_taken_id", "brokers_racing", "dropped_rows_are_never_seen_again", "large_batches")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment that s3fs reads, and where to write."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return f"s3://{BUCKET}/payloads"


async def test_a_place_in_a_bucket(s3: str) -> None:
    place = PayloadFiles(s3)
    await place.open()
    await place.write("1/00/a", LARGE)
    await place.write("1/00/b/c", b"")
    assert await place.read("1/00/a") == LARGE and await place.read("1/00/b/c") == b""
    assert sorted(await place.names("1/00")) == ["1/00/a", "1/00/b/c"] and await place.names("1/01") == []
    await place.delete(["1/00/a", "1/00/never"])
    with pytest.raises(PayloadGone):
        await place.read("1/00/a")
    await place.delete_folder("1")
    await place.delete_folder("1")
    assert await place.names("1") == []
    await place.close()


async def test_a_bucket_that_is_not_there_is_refused(s3: str) -> None:
    with pytest.raises(StoreRefused, match="cannot be written to s3://nobucket/x: The specified bucket does not exist"):
        await make_store("memory://?payloads=s3://nobucket/x").open()


async def test_an_object_store_that_is_gone_is_unavailable(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    place = PayloadFiles(s3, deadline_s=60)
    with pytest.raises(PayloadsUnavailable):
        await place.open()


@pytest.mark.parametrize("name", CHECKS)
async def test_conformance(s3: str, tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db?payloads={s3}&payload_offload_bytes=1024"
    (await run_check(name, lambda: make_store(url))).raise_failed()


async def test_a_life_with_orphans(s3: str, tmp_path: Path) -> None:
    """Put, read back, acknowledged and deleted; what was cancelled is swept after the grace."""
    url = f"sqlite:///{tmp_path}/a.db?payloads={s3}&payload_offload_bytes=1024"
    async with Trial(lambda: make_store(url)) as trial:
        store = trial.store
        assert isinstance(store, OffloadingStore)
        topic = await trial.topic()
        await trial.stored(topic, named(4), [T0, T0, T0 + 500, T0 + 500], payload=LARGE)
        await trial.mutate(topic, Operation.CANCEL, named(4)[2:3])
        rows = (await trial.lease(topic)).rows
        assert rows.payloads is not None and set(rows.payloads) == {LARGE}
        await trial.settle(topic, Operation.ACK, rows)
        await store._orphans.flush()
        assert len(await store.payloads.names(f"{topic.uid:016x}")) == 2
        for now_ms, left in ((T0, 2), (T0 + 3_600_000, 1)):
            for at in range(4):
                store._orphans._shards[topic.uid] = zlib.crc32(named(4)[at]) % SHARDS
                await store.sweep(topic, now_ms, 100)
            assert len(await store.payloads.names(f"{topic.uid:016x}")) == left
