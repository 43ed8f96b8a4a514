"""What etcd takes while a cluster is there and nothing happens, by etcd's own counters."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import defaultdict

from timeline.bench.processes import CannotMeasure
from timeline.sync.etcd.url import parse

HOUR_S = 3_600.0
SETTLED_S = 10.0
"""After the last change: what was gathered is told, and everybody has listed it again."""
TIMEOUT_S = 5.0
_BYTES = ("etcd_network_client_grpc_received_bytes_total", "etcd_network_client_grpc_sent_bytes_total")
_PROPOSALS, _PUTS = "etcd_server_proposals_applied_total", "etcd_mvcc_put_total"
_LINE = re.compile(r"^(\w+)(?:\{.*\})? ([-+\d.e]+)$", re.MULTILINE)


async def etcd_at_rest(sync: str, seconds: float) -> dict[str, float]:
    """Writes (put or proposed to etcd's log, leases and all) and bytes on the wire to clients, of `seconds` reckoned to
    an hour. Raises CannotMeasure where etcd's counters cannot be read: it asks for certificates, for one."""
    endpoints = parse(sync).endpoints
    await asyncio.sleep(SETTLED_S)
    before = await _counted(endpoints)
    await asyncio.sleep(seconds)
    after = await _counted(endpoints)
    hourly = HOUR_S / seconds
    return {
        "etcd_puts_per_hour": (after[_PUTS] - before[_PUTS]) * hourly,
        "etcd_proposals_per_hour": (after[_PROPOSALS] - before[_PROPOSALS]) * hourly,
        "etcd_client_bytes_per_hour": sum(after[name] - before[name] for name in _BYTES) * hourly,
    }


async def _counted(endpoints: tuple[str, ...]) -> dict[str, float]:
    """What the members counted since they started: bytes of all, and what each of them has, once."""
    found: dict[str, float] = defaultdict(float)
    for endpoint in endpoints:
        text = await asyncio.to_thread(_read, endpoint)
        own: dict[str, float] = defaultdict(float)
        for name, value in _LINE.findall(text):
            own[name] += float(value)
        for name in _BYTES:
            found[name] += own[name]
        for name in (_PROPOSALS, _PUTS):
            found[name] = max(found[name], own[name])
    return found


def _read(endpoint: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except OSError as cannot:
        raise CannotMeasure(f"what etcd at {endpoint} counts cannot be read: {cannot}") from cannot
    return text
