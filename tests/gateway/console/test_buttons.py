"""The buttons of the console that no other test presses, in Debian's Chromium."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

import timeline
from tests.gateway.console.stage import DEAD, EMPTY, PICKY, TOPIC, WAIT_MS, Visitor, bury
from timeline.model import State

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MANY = 6_000
"""Dead letters that take more than two steps."""


async def press(page: Page, name: str | re.Pattern[str]) -> None:
    """Press a button that asks nothing."""
    await page.get_by_role("button", name=name).click()


async def confirm(page: Page, name: str | re.Pattern[str]) -> None:
    """Press a button, and say yes to what it asks."""
    page.once("dialog", lambda asked: asked.accept())
    await press(page, name)


async def left_in(tl: timeline.Timeline, topic: str) -> int:
    return len([one.id async for one in tl.dead(topic)])


@pytest.mark.prove
async def test_work_on_letters_is_stopped_and_goes_on_after_a_lost_call(
    visitor: Visitor, tl: timeline.Timeline
) -> None:
    await tl.create_topic("many")
    async with tl.producer("many") as producer:
        (await producer.produce_many(timeline.Batch(payloads=[b"x"] * MANY, in_=0))).raise_failed()
    buried = 0
    while buried < MANY:
        taken = await tl.take("many", 1_000, "20s", lease="10m")
        (await tl.settle([one.receipt for one in taken], "bury", reason="no")).raise_failed()
        buried += len(taken)
    page = await visitor.go("/dead?topic=many")
    await page.get_by_role("button", name="Revive or purge all that match").click()
    await page.get_by_text(f"{MANY:,} of {MANY:,} dead letters match").wait_for()
    held: list[Route] = []

    async def hold_the_second(route: Route) -> None:
        held.append(route)
        if len(held) != 2:
            await route.continue_()

    await page.route("**/dead/step", hold_the_second)
    await page.locator("#work [name=at]").fill("2031-05-01T09:30")
    await confirm(page, re.compile("Revive all"))
    await expect(page.locator("#letters")).to_have_js_property("inert", True, timeout=WAIT_MS)
    await page.get_by_role("button", name="Stop").click()
    await page.get_by_text(re.compile(r"revived\. It was stopped\.")).wait_for()
    await expect(page.locator("#letters")).to_have_js_property("inert", False, timeout=WAIT_MS)
    left = await left_in(tl, "many")
    assert 0 < left < MANY and len(held) == 2, "one step was done, and the next was not sent"
    await page.unroute("**/dead/step")

    await visitor.go("/dead?topic=many")
    await page.get_by_role("button", name="Revive or purge all that match").click()
    await page.get_by_text(f"{left:,} of {left:,} dead letters match").wait_for()
    steps = []

    async def lose_the_second(route: Route) -> None:
        steps.append(route)
        await (route.abort() if len(steps) == 2 else route.continue_())

    await page.route("**/dead/step", lose_the_second)
    await confirm(page, re.compile("Purge all"))
    await page.get_by_role("button", name="Go on from here").click()
    await page.get_by_text(f"{left:,} deleted for good.").wait_for()
    await page.get_by_text("No dead letter matches").first.wait_for()
    assert await left_in(tl, "many") == 0 and len(steps) > 2
    visitor.troubles.clear()  # the browser tells the lost call


async def test_all_messages_of_a_tag_are_cancelled(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("called-off")
    async with tl.producer("called-off") as producer:
        for tag in ("spring", "autumn"):
            (
                await producer.produce_many(timeline.Batch(payloads=[b"x"] * 20, in_="30d", tags=[tag] * 20))
            ).raise_failed()
    page = await visitor.go("/topic?name=called-off&tag=spring")
    await page.get_by_role("button", name="Count, to move or cancel them").click()
    page.once("dialog", lambda asked: asked.dismiss())
    await page.get_by_role("button", name="Cancel all 20").click()
    assert len([one async for one in tl.scan("called-off")]) == 40, "only what is confirmed is done"
    await confirm(page, "Cancel all 20")
    await page.get_by_text("20 cancelled.").wait_for()
    await page.get_by_text("No message matches.").wait_for()
    assert {one.tag async for one in tl.scan("called-off")} == {"autumn"}


@pytest.mark.prove
async def test_a_schedule_is_paused_resumed_and_triggered(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.schedule(TOPIC, "steered", every="6h", payload=b"look")

    async def standing() -> Any:
        found = await tl.get_schedule(TOPIC, "steered")
        assert found is not None
        return found

    page = await visitor.go(f"/schedule?topic={TOPIC}&name=steered")
    await press(page, "Pause")
    await page.get_by_text("steered is paused.").wait_for()
    assert (await standing()).paused
    await press(page, "Resume")
    await page.get_by_text("steered goes on from now.").wait_for()
    assert not (await standing()).paused
    await press(page, "Trigger now")
    said = await page.get_by_text("was put on the timeline, due now.").inner_text()
    one = await tl.get(TOPIC, said.split(" ")[0].strip())
    assert one is not None and one.state is State.AVAILABLE and one.payload == b"look"
    await confirm(page, "Delete")
    await page.get_by_text("steered was deleted.").wait_for()


async def test_schedules_have_pages(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("plans")
    names = {f"plan-{at:02}" for at in range(60)}
    for name in sorted(names):
        await tl.schedule("plans", name, every="7d", payload=b"x")
    page = await visitor.go("/schedules?topic=plans")
    shown = await page.get_by_role("region", name="Schedules").locator("tbody th").all_inner_texts()
    assert len(shown) == 50
    await page.get_by_role("link", name="Next page").click()
    await expect(page.get_by_role("region", name="Schedules").locator("tbody th")).to_have_count(10, timeout=WAIT_MS)
    assert {*shown, *await page.get_by_role("region", name="Schedules").locator("tbody th").all_inner_texts()} == names
    await page.get_by_label("Name contains").fill("plan-07")
    await page.get_by_role("button", name="Filter").click()
    await expect(page.get_by_role("region", name="Schedules").locator("tbody th")).to_have_text(
        ["plan-07"], timeout=WAIT_MS
    )


@pytest.mark.prove
async def test_a_topic_is_resumed(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go("/")
    await page.get_by_label("Topic", exact=True).fill(EMPTY)
    await page.get_by_role("button", name="Open").click()
    await press(page, "Resume")
    await page.get_by_text(f"{EMPTY} delivers again.").wait_for()
    assert not next(each.settings.paused for each in await tl.topics() if each.name == EMPTY)
    await press(page, "Pause")
    await page.get_by_text(f"{EMPTY} is paused").wait_for()


@pytest.mark.prove
async def test_a_letter_is_revived_later_and_another_purged_each_on_its_page(
    visitor: Visitor, tl: timeline.Timeline
) -> None:
    await tl.create_topic("letters")
    await bury(tl, ["later", "never"], "letters")
    page = await visitor.go("/message?topic=letters&id=later")
    await page.get_by_label("In", exact=True).fill("2h")
    await press(page, "Revive")
    await page.get_by_text("later is back on the timeline.").wait_for()
    one = await tl.get("letters", "later")
    assert one is not None and one.state is State.WAITING
    page = await visitor.go("/message?topic=letters&id=never")
    await confirm(page, "Purge")
    await page.get_by_text("never was deleted for good.").wait_for()
    assert await tl.get("letters", "never") is None


async def test_a_leased_message_is_cancelled_only_if_that_is_meant(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("held")
    async with tl.producer("held") as producer:
        await producer.produce(b"x", id="with-somebody", in_=0)
    (taken,) = await tl.take("held", 1, "20s", lease="10m")
    page = await visitor.go("/message?topic=held&id=with-somebody")
    await confirm(page, "Cancel")
    await page.get_by_text("Cancel it although a consumer has it").first.wait_for()
    assert await tl.get("held", "with-somebody") is not None
    visitor.troubles.clear()  # the browser notes the status 409
    await page.get_by_label("Cancel it although a consumer has it").check()
    await confirm(page, "Cancel")
    await page.get_by_text("with-somebody was cancelled.").wait_for()
    assert await tl.get("held", "with-somebody") is None and taken.id == "with-somebody"


@pytest.mark.prove
async def test_choices_of_a_list_and_of_a_chart(visitor: Visitor) -> None:
    page = await visitor.go(f"/topic?name={TOPIC}")
    await page.get_by_role("button", name="7d", exact=True).click()
    await expect(page.locator("figcaption")).to_contain_text("come due within 7d", timeout=WAIT_MS)
    await page.get_by_label("dead", exact=True).check()
    await page.get_by_label("Id begins with").fill("lost-1")
    await page.get_by_role("button", name="Filter").click()
    expected = len([at for at in range(DEAD) if str(at).startswith("1")])
    await expect(page.locator("#messages a.id")).to_have_count(expected, timeout=WAIT_MS)
    await page.get_by_role("link", name="Dead letters", exact=True).last.click()
    await page.get_by_label("Reason contains").fill(PICKY)
    await page.get_by_role("button", name="Filter").click()
    await expect(page.locator("#letters tbody a.id")).to_have_count(len(range(0, DEAD, 3)), timeout=WAIT_MS)
    await visitor.go("/late")
    await page.get_by_role("navigation", name="Since").get_by_role("link", name="24h").click()
    assert "since=24h" in page.url
