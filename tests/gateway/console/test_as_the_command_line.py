"""What pages say in Chromium is what the command line says, page by page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.async_api import Page, expect

import timeline
from tests.gateway.conftest import Site
from tests.gateway.console.stage import DEAD, TOPIC, WAIT_MS, Visitor
from tests.gateway.processes import TIMELINE

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def cli(site: Site, *arguments: str) -> Any:
    """What the command line says: a document for each line."""
    started = await asyncio.create_subprocess_exec(
        *TIMELINE, *arguments, "--address", site.broker, "--json", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await started.communicate()
    return [json.loads(line) for line in out.splitlines()]


async def rows(page: Page, name: str, columns: int) -> list[tuple[str, ...]]:
    """The texts of a table's first columns."""
    found = page.get_by_role("region", name=name, exact=True).locator("tbody tr")
    lines = [await each.locator("th, td").all_inner_texts() for each in await found.all()]
    return [tuple(text.strip() for text in line[:columns]) for line in lines if len(line) >= columns]


async def fields(page: Page) -> dict[str, str]:
    """The fields of a page, by name."""
    names = await page.locator("main dl dt").all_inner_texts()
    values = await page.locator("main dl dd").all_inner_texts()
    return dict(zip(map(str.lower, names), map(str.strip, values), strict=True))


async def in_utc(visitor: Visitor) -> None:
    """Show times as the command line writes them for programs."""
    page = await visitor.go("/")
    await page.get_by_role("button", name="UTC").click()


def shown(time: str) -> str:
    """A time of the command line as pages have it."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M:%S.%f}"[:-3]


async def agree(look: Callable[[], Awaitable[tuple[Any, Any]]]) -> None:
    """Page and command line look at moments of their own, so both look again until they say the same."""
    last = asyncio.get_running_loop().time() + WAIT_MS / 1000
    while True:
        page, command = await look()
        if page == command or asyncio.get_running_loop().time() > last:
            assert page == command
            return


async def test_the_overview(visitor: Visitor, stage: Site) -> None:
    async def look() -> tuple[Any, Any]:
        page = await visitor.go("/")
        (told,) = await cli(stage, "top", "--once")
        listed = {name: [text.replace(",", "") for text in row] for name, *row in await rows(page, "Topics", 9)}
        topics = {topic["name"]: topic for topic in told["topics"]}
        said = {name: (listed[name][1], listed[name][-3], listed[name][-1]) for name in topics}
        return said, {
            name: (str(one["due"]), str(one["waiting"]), str(one["consumers"])) for name, one in topics.items()
        }

    await agree(look)


@pytest.mark.prove
async def test_a_topic_and_its_settings(visitor: Visitor, stage: Site) -> None:
    page = await visitor.go(f"/topic?name={TOPIC}")
    (told,) = await cli(stage, "topic", "show", TOPIC)
    await page.get_by_text("Settings", exact=True).click()
    for name in ("max_deliveries", "max_payload_bytes", "max_rate_per_s", "push_concurrency", "push_rate"):
        assert await page.locator(f"[name={name}]").input_value() == str(told[name]), name
    assert await page.locator("[name=lease]").input_value() == f"{told['lease_ms'] // 1000}s"

    async def look() -> tuple[Any, Any]:
        page = await visitor.go(f"/topic?name={TOPIC}")
        (told,) = await cli(stage, "topic", "show", TOPIC)
        waiting = (await page.locator(".tile").filter(has_text="waiting").locator("b").inner_text()).replace(",", "")
        return waiting, str(told["messages"]["waiting"])

    await agree(look)


async def test_the_messages_of_a_topic(visitor: Visitor, stage: Site) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/topic?name={TOPIC}&state=waiting&tag=tag-1")
    told = await cli(stage, "ls", TOPIC, "--state", "waiting", "--tag", "tag-1", "--all")
    said = await rows(page, "Messages", 6)
    wanted = [
        (one["id"], one["state"], shown(one["due"]), one["tag"], str(one["deliveries"]), one["group"]) for one in told
    ]
    assert len(said) == 30 and sorted(said) == sorted(wanted)


async def test_the_dead_letters(visitor: Visitor, stage: Site) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/dead?topic={TOPIC}")
    told = await cli(stage, "dead", "list", TOPIC)
    said = await rows(page, "Dead letters", 7)
    wanted = [
        ("", one["id"], one["reason"], shown(one["died"]), str(one["deliveries"]), one["tag"], one["group"])
        for one in told
    ]
    assert len(said) == DEAD and sorted(said) == sorted(wanted)


@pytest.mark.parametrize("id", ["order-7", pytest.param("lost-3", marks=pytest.mark.prove)])
async def test_a_message(visitor: Visitor, stage: Site, id: str) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/message?topic={TOPIC}&id={id}")
    (told,) = await cli(stage, "show", TOPIC, id)
    said = await fields(page)
    for name in ("state", "version", "deliveries", "group", "tag"):
        assert said[name] == str(told[name]), name
    times = {"scheduled": told["scheduled"]} | ({"died": told["died"]} if told["died"] else {"due": told["due"]})
    assert {name: said[name] for name in times} == {name: shown(time) for name, time in times.items()}
    assert said.get("reason") == told["reason"] and said["holder"] == (told["holder"] or "–")
    assert said.get("content-type") == (told["headers"] or {}).get("content-type")
    await page.get_by_text("Text", exact=True).click()
    assert (await page.locator("details[open] pre").inner_text()).strip() == told["payload"]


@pytest.fixture
async def late(tl: timeline.Timeline) -> str:
    """A message that was put too late, and has been delivered."""
    await tl.create_topic("overdue")
    async with tl.producer("overdue") as producer:
        made = await producer.produce(b"", at=datetime.now(UTC) - timedelta(minutes=1))
    await tl.take("overdue", 1, "20s", lease="10m")
    return made.id


@pytest.mark.prove
async def test_why_a_message_was_late(visitor: Visitor, stage: Site, late: str) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/message?topic=overdue&id={late}")
    (told,) = await cli(stage, "why", "overdue", late)
    assert told["late"], "it was due a minute ago"
    for one in told["late"]:
        line = page.locator(".why p").filter(has_text=shown(one["delivered"]))
        await expect(line).to_contain_text(one["consumer"], timeout=WAIT_MS)


@pytest.mark.prove
async def test_late_deliveries(visitor: Visitor, stage: Site, late: str) -> None:
    await in_utc(visitor)

    async def look() -> tuple[Any, Any]:
        page = await visitor.go("/late?since=7d")
        told = await cli(stage, "late", "--since", "7d")
        said = await rows(page, "Late deliveries", 5)
        wanted = [(shown(one["delivered"]), one["topic"], one["id"], one["consumer"]) for one in told]
        assert late in {one["id"] for one in told}
        return sorted((row[0], *row[2:]) for row in said), sorted(wanted)

    await agree(look)


async def test_schedules(visitor: Visitor, stage: Site) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/schedules?topic={TOPIC}")
    told = {one["name"]: one for one in await cli(stage, "schedule", "ls", TOPIC)}
    said = {row[0]: row for row in await rows(page, "Schedules", 7)}
    assert said.keys() == told.keys() and {"daily", "hourly"} <= told.keys()
    for name, one in told.items():
        _, topic, _, state, following, produced, missed = said[name]
        assert (topic, state) == (TOPIC, one["state"])
        assert following == (shown(one["next"]) if one["next"] else "–")
        assert (produced, missed) == (str(one["produced"] + one["caught_up"]), str(one["missed"]))


async def test_a_schedule(visitor: Visitor, stage: Site, tl: timeline.Timeline) -> None:
    await in_utc(visitor)
    page = await visitor.go(f"/schedule?topic={TOPIC}&name=daily")
    (told,) = await cli(stage, "schedule", "show", TOPIC, "daily")
    said = await fields(page)
    for name in ("produced", "missed", "skipped", "failed", "zone", "overlap", "revision"):
        assert said[name] == str(told[name]), name
    assert said["cron"] == " ; ".join(told["cron"])
    zoned = [datetime.fromisoformat(at) for at in told["times"]]
    times = [f"{at - at.utcoffset():%Y-%m-%d %H:%M:%S}" for at in zoned]  # type: ignore[operator]
    assert [one[:19] for one in await page.locator("ol.plain time").all_inner_texts()] == times
    assert (await page.locator("pre").inner_text()).strip() == told["payload"]


@pytest.mark.prove
async def test_the_cluster(visitor: Visitor, stage: Site) -> None:
    async def look() -> tuple[Any, Any]:
        page = await visitor.go("/cluster")
        (told,) = await cli(stage, "cluster")
        brokers = [(row[0], row[2], row[8], row[9]) for row in await rows(page, "Brokers", 10)]
        consumers = {(row[0], row[1], row[2]) for row in await rows(page, "Consumers", 3)}
        wanted = [(one["broker"], one["address"], one["store"], one["version"]) for one in told["brokers"]]
        assert wanted
        return (brokers, consumers), (
            wanted,
            {(one["id"], one["topic"], one["health"].lower()) for one in told["consumers"]},
        )

    await agree(look)
