"""Webhooks and long polls while receivers or clients, gateways, brokers and the store are killed in turn.

Nothing is lost, and nothing is early. A release, or a lease that ran out, explains each repeat: the store's own log
says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.faults.gateway.machine import GatewayMachine, judged, store_of_its_own
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.postgresql_pair import open_folder
from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

Record = Callable[[str, object], None]

Way = Callable[[GatewayMachine, int], Coroutine[Any, Any, None]]

WAYS = (GatewayMachine.begin_pushing, GatewayMachine.begin_polling)
NAMES = ("webhooks", "long polls")
FEW, MANY = 2_000, 106_000
"""So many messages are put. A twentieth of them is cancelled."""


async def _killed_in_turn(
    servers: Running, folder: Path, way: Way, record: Record, puts: int, rate: int, more: int
) -> None:
    require_service("postgresql")
    out = 20 if puts == FEW else 100
    sync = f"{servers.url(EtcdServer)}/{way.__name__}-{puts}"
    with open_folder() as made_in, store_of_its_own(made_in / "postgresql") as server:
        async with GatewayMachine(folder, server, sync) as made:
            await way(made, rate)
            await made.work_on(more)
            await made.kill_in_turn(puts, more, out, (1,) if puts == FEW else (1, 2))
            counted = await judged(made, puts, out)
    record("counted", json.dumps(counted))
    print("", json.dumps(counted), sep="\n")


@pytest.mark.prove
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
async def test_everything_is_killed_once(servers: Running, tmp_path: Path, way: Way, record_property: Record) -> None:
    await _killed_in_turn(servers, tmp_path, way, record_property, FEW, rate=60, more=100)


@pytest.mark.prove
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
async def test_everything_is_killed_again_and_again(
    servers: Running, tmp_path: Path, way: Way, record_property: Record
) -> None:
    await _killed_in_turn(servers, tmp_path, way, record_property, MANY, rate=200, more=1_500)
