"""Pictures of each page from the demo's data, in light and dark, for docs/console.md.

With TIMELINE_SCREENS=docs/console they are kept there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import timeline
from tests.documents.pages import DOCS
from tests.gateway.console.stage import chromium, window
from tests.gateway.processes import broker, gateway
from timeline.demo.flights import DEFAULT_DAY as DAY
from timeline.demo.flights import MINUTE_MS, flights_of
from timeline.driver.brokers import TopicLoad

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOPIC = "departures"
LATE, LOST = 8, 40
REASONS = ("the gate is closed: 31", "no aircraft: N14228 is in Boston", "crew is over its hours")
SCREENS = {
    "overview": "/",
    "topic": f"/topic?name={TOPIC}",
    "message": "",
    "dead": f"/dead?topic={TOPIC}",
    "late": "/late",
    "schedules": "/schedules",
    "produce": f"/produce?topic={TOPIC}",
    "cluster": "/cluster",
}


async def fill(tl: timeline.Timeline) -> str:
    """Put the demo's day as if it began now; some flights late, some dead. Return the id of a late one."""
    await tl.create_topic(TOPIC)
    await tl.create_topic("runway")
    flights = flights_of(DAY, None)
    begin_ms, now_ms = flights[LATE + LOST].scheduled_ms, (await tl.standing()).brokers[0].now_ms
    async with tl.producer(TOPIC) as producer:
        for at, flight in enumerate(flights):
            late = at < LATE
            due_ms = now_ms - (at + 1) * MINUTE_MS if late else now_ms + flight.scheduled_ms - begin_ms + MINUTE_MS
            if LATE <= at < LATE + LOST:
                due_ms = now_ms
            headers = {"content-type": "application/json", "airline": flight.carrier}
            await producer.produce(flight.payload(), at=due_ms, id=flight.id, tag=flight.origin, headers=headers)
    left = LATE + LOST
    early = {flight.id for flight in flights[:LATE]}
    while left:
        for one in await tl.take(TOPIC, min(50, left), "20s", lease="1h"):
            left -= 1
            if one.id not in early:
                await tl.settle([one.receipt], "bury", reason=REASONS[left % len(REASONS)])
    await tl.schedule("runway", "inspection", every="1h", payload=b"inspect the runway")
    await tl.schedule("runway", "de-icing", cron="0 4 * 11-12,1-3 *", zone="America/New_York", payload=b"trucks out")
    await tl.schedule("runway", "night-watch", cron="*/20 0-5 * * 1-5", zone="America/New_York", payload=b"look")
    while not any(load.topic == TOPIC and load.waiting > len(flights) // 2 for load in await _loads(tl)):
        await asyncio.sleep(0)  # brokers count every few seconds
    return min(early)


async def _loads(tl: timeline.Timeline) -> tuple[TopicLoad, ...]:
    return (await tl.standing()).brokers[0].topics


def test_the_page_shows_each_of_them() -> None:
    page = (DOCS / "console.md").read_text()
    wanted = {f"console/{name}-{scheme}.png" for name in SCREENS for scheme in ("light", "dark")}
    assert wanted == {f"console/{file.name}" for file in (DOCS / "console").glob("*.png")}
    assert all(f"({name})" in page for name in wanted)


@pytest.mark.prove
async def test_pictures_of_each_page(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    require_service("chromium")
    kept = os.environ.get("TIMELINE_SCREENS")
    with broker(tmp_path) as served, gateway(tmp_path, served["listen"]) as opened:
        async with timeline.connect(served["listen"]) as tl:
            late = await fill(tl)
        async with chromium() as browser:
            for scheme in ("light", "dark"):
                shape: dict[str, Any] = {"color_scheme": scheme, "viewport": {"width": 1280, "height": 860}}
                async with window(browser, f"http://{opened['listen']}", **shape) as visitor:
                    for name, path in SCREENS.items():
                        page = await visitor.go(path or f"/message?topic={TOPIC}&id={late}")
                        file = tmp_path / f"{name}-{scheme}.png"
                        await page.screenshot(path=file, animations="disabled", full_page=name in ("message", "dead"))
                        assert file.stat().st_size > 10_000, name
                        if kept:
                            Path(kept).mkdir(parents=True, exist_ok=True)
                            shutil.copy(file, kept)
                    assert visitor.troubles == []
