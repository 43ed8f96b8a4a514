"""Places for payloads: names, files, and URLs that say where they lie."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from timeline.storage_plugins import make_store, offload_of
from timeline.storage_plugins.asks import READ_AGAIN_MS
from timeline.storage_plugins.conformance.trial import T0, Trial, named
from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.offload import (
    PayloadGone,
    PayloadsRefused,
    PayloadsUnavailable,
    Place,
    place_of_name,
)
from timeline.storage_plugins.offload import store as offload_store
from timeline.storage_plugins.offload.files import PayloadFiles


def test_names_tell_what_they_are_of() -> None:
    for id in (b"a", b"x" * 255, "á/../-".encode(), bytes(range(1, 200))):
        place = Place(id, (1 << 64) - 1, b"12345678")
        name = place.name(7)
        assert place_of_name(name) == place and ".." not in name
        assert all(len(part) <= 255 for part in name.split("/")) and len(name) < 700
    for other in ("", "a", "1/2/.draft", "1/2/zz-1-2", "1/2/61-0000000000000001-zz"):
        assert place_of_name(other) is None


async def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    place = PayloadFiles(f"file://{tmp_path}/new/folder")
    await place.open()
    await place.write("1/00/a", b"one")
    await place.write("1/00/deep/b", b"")
    assert await place.read("1/00/a") == b"one" and await place.read("1/00/deep/b") == b""
    assert sorted(await place.names("1/00")) == ["1/00/a", "1/00/deep/b"] and await place.names("2") == []
    await place.delete(["1/00/a", "1/00/never"])
    with pytest.raises(PayloadGone):
        await place.read("1/00/a")
    await place.delete_folder("1")
    await place.delete_folder("1")
    assert await place.names("1") == []
    await place.close()
    await place.close()
    with pytest.raises(PayloadsUnavailable, match="closed"):
        await place.read("1/00/a")


async def test_a_place_that_hangs_holds_no_more_than_its_threads_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that gave up, nothing waits to be done, with its payload in memory."""
    place = PayloadFiles("memory://hanging")
    await place.open()
    place._deadline_s = 0.05
    awake, plain = threading.Event(), place._files.pipe_file

    def hangs(path: str, data: bytes) -> None:
        awake.wait()
        plain(path, data)

    monkeypatch.setattr(place._files, "pipe_file", hangs)
    try:
        for _ in range(2):
            ends = await asyncio.gather(*(place.write(f"1/{at}", b"x") for at in range(40)), return_exceptions=True)
            assert all(isinstance(end, PayloadsUnavailable) and "within 0.05 s" in str(end) for end in ends)
        assert place._threads is not None and place._threads._work_queue.qsize() == 0
    finally:
        awake.set()
    place._deadline_s = 60.0
    await place.write("1/after", b"x")
    assert await place.read("1/after") == b"x"
    await place.close()


async def test_a_place_that_is_not_mounted_has_not_lost_its_payloads(tmp_path: Path) -> None:
    place, folder, away = PayloadFiles(f"file://{tmp_path}/p"), tmp_path / "p", tmp_path / "disk"
    await place.open()
    assert place.fresh
    await place.claim("9f" * 16)
    await place.write("1/00/a", b"one")
    folder.rename(away)
    folder.mkdir()
    for call in (place.read("1/00/a"), place.write("1/00/b", b"two"), place.check()):
        with pytest.raises(PayloadsUnavailable, match="is it mounted"):
            await call
    folder.rmdir()
    away.rename(folder)
    assert await place.read("1/00/a") == b"one"
    with pytest.raises(PayloadGone):
        await place.read("1/00/b")
    await place.close()
    await place.open()
    assert not place.fresh
    await place.close()


@pytest.mark.slow
async def test_a_folder_that_is_not_mounted_buries_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db?payloads=file://{tmp_path}/p&payload_offload_bytes=1024"
    folder, away = tmp_path / "p", tmp_path / "disk"
    async with Trial(lambda: make_store(url)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(3), payload=b"x" * 5_000)
        folder.rename(away)
        folder.mkdir()
        leased = await trial.lease(topic)
        assert not len(leased.rows) and not leased.damaged
        await trial.store.close()
        with pytest.raises(StoreRefused, match="is it mounted"):
            await trial.make().open()
        shutil.rmtree(folder)
        away.rename(folder)
        await trial.reopen()
        rows = (await trial.lease(topic, now_ms=T0 + READ_AGAIN_MS)).rows
        assert rows.payloads is not None and rows.payloads.tolist() == [b"x" * 5_000] * 3


@pytest.mark.slow
async def test_a_folder_that_is_not_mounted_is_noticed_by_a_late_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last of many messages has an offloaded payload."""
    monkeypatch.setattr(offload_store, "LOOKED_UP_AT_ONCE", 50)
    url = f"sqlite:///{tmp_path}/a.db?payloads=file://{tmp_path}/p&payload_offload_bytes=4096"
    folder, away = tmp_path / "p", tmp_path / "disk"
    async with Trial(lambda: make_store(url)) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(150), payload=[b"small", b"x" * 2_000, b""] * 50)
        await trial.stored(topic, [b"z"], payload=b"x" * 5_000)
        await trial.store.close()
        folder.rename(away)
        folder.mkdir()
        with pytest.raises(StoreRefused, match="is it mounted"):
            await trial.make().open()
        shutil.rmtree(folder)
        away.rename(folder)
        (folder / "timeline-payloads").unlink()
        await trial.reopen()
        assert (await trial.row(topic, b"z"))["payloads"] == b"x" * 5_000


async def test_folders_of_long_ids_go_with_their_files(tmp_path: Path) -> None:
    place = PayloadFiles(f"file://{tmp_path}/p")
    await place.open()
    names = [Place(b"x" * 255, birth, b"12345678").name(7) for birth in range(20)]
    await asyncio.gather(*(place.write(name, b"data") for name in names))
    await asyncio.gather(*(place.delete([name]) for name in names[:10]), *(place.write(n, b"x") for n in names[10:]))
    assert sorted(await place.names("0000000000000007")) == sorted(names[10:])
    await place.delete(names[10:])
    (shard,) = (tmp_path / "p" / "0000000000000007").iterdir()
    assert not list(shard.iterdir())
    await place.close()


async def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = f"memory://?payloads=file://{tmp_path}/file/payloads"
    with pytest.raises(StoreRefused, match="cannot be written to"):
        await make_store(url).open()


def test_urls() -> None:
    plain = "redis://u:p@h/0?a=b&payloads=s3://bucket/x&payload_offload_bytes=1MiB&c=d%20e"
    assert offload_of(plain) == ("redis://u:p@h/0?a=b&c=d%20e", "s3://bucket/x", 1 << 20)
    assert offload_of("memory://") == ("memory://", "", 256 * 1024)
    assert offload_of("memory://?payloads=file%3A%2F%2F%2Fa%20b") == ("memory://", "file:///a b", 256 * 1024)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://?payload_offload_bytes=4096", "needs payloads="),
        ("memory://?payloads=/folder", "by URL, file:///folder"),
        ("memory://?payloads=file:///tmp/x&payload_offload_bytes=lots", "payload_offload_bytes: a size"),
        ("memory://?payloads=file:///tmp/x&payload_offload_bytes=10", "from 1024 to"),
        ("memory://?payloads=nofs://x", "no files can be kept at nofs://. Give a folder"),
        ("memory://?payloads=memory://", "memory:// alone is no place"),
        ("memory://?payloads=s3://key:secret@bucket/x", "credentials are not taken from a URL"),
    ],
)
def test_bad_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(StoreRefused, match=says) as refused:
        make_store(url)
    assert "secret" not in str(refused.value)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(PayloadsRefused, match=r"not installed.*adlfs"):
        PayloadFiles("abfs://container/x")
