"""The topic that a measurement has for itself, on any store, and what that store says of itself.

The store may be one that others use: nothing there is asked about or touched but topics of this name, which are dropped
at the end, also when the measurement fails or is interrupted.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from timeline.bench.processes import CannotMeasure
from timeline.errors import Invalid, TimelineError
from timeline.storage_plugins import make_store, open_store
from timeline.storage_plugins.contract import Store

NAME_BYTES = 6


@dataclass(frozen=True, slots=True)
class OwnTopic:
    """`name`: of a topic that nobody else has; more of them are made by what follows it. `server`: the store in words.
    `durable`, `survives_failover`: as the plugin declares them with these settings. `warnings`: what weakens them."""

    name: str
    server: str
    durable: bool
    survives_failover: bool
    warnings: tuple[str, ...] = field(default=())

    @property
    def store(self) -> dict[str, Any]:
        """What a figure was measured on, as reports have it."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


def scheme(url: str) -> str:
    """Which kind of store `url` names."""
    return url.partition("://")[0].removesuffix(":")


@asynccontextmanager
async def own_topic(url: str, scenario: str) -> AsyncIterator[OwnTopic]:
    """A name for a topic, not made yet; topics whose names begin with it are dropped at the end, when whoever
    had the store open has closed it. Raises CannotMeasure: the store cannot be opened, or does not let it go."""
    name = f"bench-{scenario}-{os.urandom(NAME_BYTES).hex()}"
    try:
        store = make_store(url)
        try:
            opened = await store.open()
        finally:
            await store.close()
    except Invalid:  # the URL is none: nothing of a store's
        raise
    except TimelineError as trouble:
        raise CannotMeasure(trouble.reason) from trouble
    declared = store.capabilities
    own = OwnTopic(name, opened.server, declared.durable, declared.survives_failover, opened.warnings)
    try:
        yield own
    finally:
        if scheme(url) != "memory":  # it ended with the broker
            await _drop(url, name)


async def _drop(url: str, name: str) -> None:
    try:
        store = await open_store(url)
        try:
            await drop_in(store, name)
        finally:
            await store.close()
    except TimelineError as trouble:
        raise CannotMeasure(
            f"the store has kept what was put there; drop it by `timeline topic drop {name}`: {trouble.reason}"
        ) from trouble


async def drop_in(store: Store, name: str) -> None:
    """Drops the topics of a store that this process has open whose names begin with `name`."""
    for topic in await store.topics():
        if topic.name.startswith(name):
            await store.drop_topic(topic)
