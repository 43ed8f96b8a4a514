"""Payloads that are gone or not what they were: the message alone becomes a dead letter, with its own reason."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.broker.link import Link, Pipe, broker, statuses
from timeline.columns import Ragged
from timeline.model import Operation, State, Status, payload_sums
from timeline.wire import Deliver, Scan, ScanPage, decode_as, encode


@pytest.mark.slow
async def test_what_is_gone_or_cut_short_is_buried_and_its_neighbours_are_delivered(tmp_path: Path):
    path = tmp_path / "a.db"
    async with broker(f"sqlite:///{path}") as link:
        ids = ["a", "cut", "c", "gone", "other"]
        stored = await link.put(ids, payloads=Ragged.of([id.encode() * 3 for id in ids]))
        assert statuses(stored) == [Status.OK] * 5
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE payload SET payload = 'cu' WHERE payload = CAST('cutcutcut' AS BLOB)")
        connection.execute("DELETE FROM payload WHERE payload = CAST('gonegonegone' AS BLOB)")
        changed = "UPDATE payload SET payload = 'another-one-it!' WHERE payload = CAST('otherotherother' AS BLOB)"
        connection.execute(changed)
    connection.close()
    async with broker(f"sqlite:///{path}") as link:
        consumer = await link.consume()
        got: dict[bytes, bytes] = {}
        differ: list[bytes] = []
        while len(got) < 3:
            frame = await consumer.down(Deliver)
            got |= zip(frame.ids.tolist(), frame.payloads.tolist(), strict=True)
            sums = payload_sums(frame.payloads, frame.headers)
            differ += frame.ids.take(np.flatnonzero(sums != frame.payload_sum)).tolist()
            assert statuses(await link.settle(consumer, frame, Operation.ACK)) == [Status.OK] * len(frame.birth)
        assert got == {b"a": b"aaa", b"c": b"ccc", b"other": b"another-one-it!"}
        assert differ == [b"other"]  # what is as long as it was, its receiver finds out
        assert await _dead(link) == {b"cut": b"payload damaged", b"gone": b"payload gone"}


@pytest.mark.slow
async def test_a_payload_file_that_is_gone_is_an_error_of_its_message_alone(tmp_path: Path):
    """And a broker that was not told where payloads lie says so; once it is, they are revived whole."""
    plain, folder = f"sqlite:///{tmp_path}/a.db", tmp_path / "payloads"
    apart = f"{plain}?payloads=file://{folder}&payload_offload_bytes=1KiB"
    large = {id: id.encode() * 2_000 for id in ("a", "b", "c")}
    async with broker(apart) as link:
        ids = [*large, "small"]
        contents = Ragged.of([*large.values(), b"small"])
        assert statuses(await link.put(ids, payloads=contents)) == [Status.OK] * 4
    files = {path.read_bytes()[:1]: path for path in folder.rglob("*") if path.is_file()}
    files[b"a"].unlink()
    files[b"b"].write_bytes(files[b"b"].read_bytes()[:-1])
    async with broker(apart) as link:
        consumer = await link.consume()
        got, dead = await _took(link, consumer, 2), await _dead(link)
        assert got == {b"small": b"small", b"c": large["c"]}
        assert dead == {b"a": b"payload gone", b"b": b"payload damaged"}
        later = Ragged.of([large["c"], large["a"]])
        assert statuses(await link.put(["held", "later"], in_ms=[0, 3_600_000], payloads=later)) == [Status.OK] * 2
        assert (await consumer.down(Deliver)).ids.tolist() == [b"held"]
    async with broker(plain) as link:
        assert statuses(await link.put(["small"], payloads=Ragged.of([b"small"]))) == [Status.OK]
        assert statuses(await link.mutate(Operation.MOVE, ["later"])) == [Status.OK]
        assert await _took(link, await link.consume(), 1) == {b"small": b"small"}
        while len(dead := await _dead(link)) < 4:
            await asyncio.sleep(0)
        assert dead[b"held"] == dead[b"later"] == b"payload apart"
    async with broker(apart) as link:
        link.random.seed(2)  # else these were the same calls as before
        assert statuses(await link.mutate(Operation.REVIVE, ["held", "later"])) == [Status.OK] * 2
        assert await _took(link, await link.consume(), 2) == {b"held": large["c"], b"later": large["a"]}


async def _took(link: Link, consumer: Pipe, count: int) -> dict[bytes, bytes]:
    """So many messages, received and acknowledged."""
    got: dict[bytes, bytes] = {}
    while len(got) < count:
        frame = await consumer.down(Deliver)
        got |= zip(frame.ids.tolist(), frame.payloads.tolist(), strict=True)
        assert statuses(await link.settle(consumer, frame, Operation.ACK)) == [Status.OK] * len(frame.birth)
    return got


async def _dead(link: Link) -> dict[bytes, bytes]:
    """The dead letters and their reasons."""
    await link.node.dealers.of(await link.node.catalog.find("t")).own_settles.settled.wait()
    dead: dict[bytes, bytes] = {}
    async for data in link.node.service.unary_stream("Scan", encode(Scan("t", states=(State.DEAD,)))):
        rows = decode_as(data, ScanPage).rows
        dead |= zip(rows.ids.tolist(), rows.dead.tolist(), strict=True)
    return dead
