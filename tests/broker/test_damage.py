"""Payloads that are gone or not what they were: the message alone becomes a dead letter, with its own reason."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from tests.broker.link import broker, statuses
from timeline.columns import Ragged
from timeline.model import Operation, State, Status, payload_sums
from timeline.wire import Deliver, Scan, ScanPage, decode_as, encode


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
        await link.node.dealer(await link.node.topic("t")).back.settled.wait()
        dead: dict[bytes, bytes] = {}
        async for data in link.node.service.unary_stream("Scan", encode(Scan("t", states=(State.DEAD,)))):
            rows = decode_as(data, ScanPage).rows
            dead |= zip(rows.ids.tolist(), rows.dead.tolist(), strict=True)
        assert dead == {b"cut": b"payload damaged", b"gone": b"payload gone"}
