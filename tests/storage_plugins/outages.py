"""What tests of a store whose server fails have in common: filling its disk, waiting until it works again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.disk import server_folder
from tests.servers.postgresql import PostgresqlServer
from tests.services import require_service
from timeline.model import Status, Topic
from timeline.storage_plugins.conformance.trial import Trial, named, statuses
from timeline.storage_plugins.contract import StoreError, StoreUnavailable, StoreUnknown

OFTEN = 10_000


@contextmanager
def own_postgresql(kind: type[PostgresqlServer]) -> Iterator[PostgresqlServer]:
    """A server that a test may harm, in a folder that the server's user may pass through."""
    require_service("postgresql")
    with server_folder() as folder:
        server = kind(folder / kind.name)
        try:
            yield server.start()
        finally:
            server.stop()


async def fill(trial: Trial, topic: Topic, batch: int, payload_bytes: int) -> tuple[set[bytes], StoreError | str]:
    """The ids that were acknowledged, and what the first batch was told that was not. Payloads are of chance: some
    servers store what repeats in less."""
    stored: set[bytes] = set()
    for number in range(OFTEN):
        ids = named(batch, f"fill-{number:05d}")
        try:
            answers = await trial.put(topic, ids, payload=os.urandom(payload_bytes))
        except (StoreUnavailable, StoreUnknown) as error:
            return stored, error
        told = statuses(answers)
        stored.update(id for id, status in zip(ids, told, strict=True) if status is Status.OK)
        if set(told) != {Status.OK}:
            return stored, next(iter(answers.details.values()))
    raise AssertionError("the disk never filled up")


async def usable(trial: Trial) -> None:
    """Returns when the store takes writes again."""
    while True:
        try:
            return await trial.store.check()
        except StoreUnavailable:
            await asyncio.sleep(0)
