"""kill -9 of who puts, acknowledges and cancels large messages: every message has its payload afterwards, whole, and a
sweep leaves no other file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage_plugins.large_puts import content
from timeline.model import Rows, State
from timeline.storage_plugins.conformance.trial import T0, Trial
from timeline.storage_plugins.offload import SHARDS
from timeline.storage_plugins.offload.files import PayloadFiles
from timeline.storage_plugins.offload.store import GRACE_MS, OffloadingStore
from timeline.storage_plugins.sqlite import SqliteStore

ALL = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))


@pytest.mark.processes
@pytest.mark.parametrize("puts", [50, 201, 402])
@pytest.mark.prove
async def test_every_message_has_its_payload_after_a_kill(tmp_path: Path, puts: int) -> None:
    url, place = f"sqlite:///{tmp_path}/a.db", f"file://{tmp_path}/payloads"
    command = [sys.executable, "-m", "tests.storage_plugins.large_puts"]
    asked = f"{url}?payloads={place}&payload_offload_bytes=1KiB"
    put, gone = set[bytes](), set[bytes]()
    with subprocess.Popen([*command, asked], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said, *ids = line.split()
            (put if said == b"put" else gone).update(ids)
            if len(put) >= puts:
                break
        process.kill()
        for line in process.stdout:  # what it said before it was killed
            said, *ids = line.split()
            (put if said == b"put" else gone).update(ids)
    store = OffloadingStore(SqliteStore(url), PayloadFiles(place), 1_024)
    async with Trial(lambda: store) as trial:
        (topic,) = await store.topics()
        rows = await trial.scan(topic, states=ALL, payload=True)
        found = _contents(rows)
        assert put - gone <= found.keys()
        assert {id: len(data) for id, data in found.items() if data != content(id)} == {}
        files = await store.payloads.names(f"{topic.uid:016x}")
        assert len(files) >= len(found)
        for now_ms in (T0, T0 + GRACE_MS):
            for _ in range(SHARDS):
                await store.sweep(topic, now_ms, 1_000)
        left = await store.payloads.names(f"{topic.uid:016x}")
        assert len(left) == len(found) == len(_contents(await trial.scan(topic, states=ALL, payload=True)))


def _contents(rows: Rows) -> dict[bytes, bytes]:
    assert rows.payloads is not None
    return dict(zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True))
