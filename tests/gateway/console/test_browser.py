"""The console in Debian's Chromium: every page and every action, live values, a broker that is killed, and axe."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import TimeoutError as PlaywrightTimeout
from playwright.async_api import expect

import timeline
from tests.gateway.conftest import Site
from tests.gateway.console.stage import EMPTY, PICKY, TOPIC, WAIT_MS, WAITING, Visitor, bury, chromium, fill, window
from tests.gateway.console.test_pages import PAGES
from tests.gateway.processes import TIMELINE, broker, gateway
from tests.security.guarded import Tokens
from timeline.model import State

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SIZES = ((360, 740), (1280, 800), (2560, 1300))
HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
    return [...sources.values()].map(source => source.readyState);
}"""
"""Hides the page, or shows it again. Returns how its streams are."""
FITS = "width => innerWidth === width && document.documentElement.scrollWidth <= width"
"""Whether the window has its new width, and the page fits into it. A browser lays out some time after the change."""


async def cli(site: Site, *arguments: str) -> Any:
    """What the command line says."""
    started = await asyncio.create_subprocess_exec(
        *TIMELINE, *arguments, "--address", site.broker, "--json", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await started.communicate()
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.prove)])
async def test_everybody_can_use_every_page(stage: Site, scheme: Any, require_service: Callable[[str], None]) -> None:
    """axe finds nothing, nothing is wider than the window but what scrolls by itself, and keys reach what there is."""
    require_service("chromium")
    async with chromium() as browser, window(browser, stage.url, color_scheme=scheme) as visitor:
        for path in PAGES:
            page = await visitor.go(path)
            found = await Axe().run(page)
            assert found.violations_count == 0, f"{path}: {found.generate_report()}"
            for width, height in SIZES if scheme == "light" else SIZES[:1]:
                await page.set_viewport_size({"width": width, "height": height})
                try:
                    await page.wait_for_function(FITS, arg=width)
                except PlaywrightTimeout:
                    pytest.fail(f"{path} is wider than {width} px")
            if path != "/login":  # there, the field for the token waits for keys already
                await page.keyboard.press("Tab")
                assert await page.evaluate("document.activeElement.textContent") == "Skip to the content", path
        assert visitor.troubles == []


@pytest.mark.prove
async def test_everybody_can_use_what_a_page_shows_later(visitor: Visitor) -> None:
    """axe finds nothing in what actions, refusals and empty lists show."""
    page = visitor.page

    async def clean(where: str) -> None:
        await visitor.settled()
        found = await Axe().run(page)
        assert found.violations_count == 0, f"{where}: {found.generate_report()}"

    await visitor.go(f"/topic?name={TOPIC}&tag=tag-1")
    await page.get_by_role("button", name="Count, to move or cancel them").click()
    await page.get_by_role("button", name="Cancel all").wait_for()
    await page.get_by_text("Settings", exact=True).click()
    await clean("a counted tag, and settings")
    await page.get_by_label("max_rate_per_s").fill("many")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_role("alert").first.wait_for()
    await clean("refused settings")
    await visitor.go(f"/dead?topic={TOPIC}")
    await page.get_by_label("Choose lost-1", exact=True).check()
    await page.get_by_role("button", name="Revive or purge all that match").click()
    await page.get_by_role("button", name="Purge all").wait_for()
    await clean("counted letters")
    await visitor.go("/schedules")
    await page.get_by_text("New schedule").click()
    await page.get_by_label("Cron").fill("30 6 * * 1-5")
    await page.get_by_role("button", name="Show its next times").click()
    await page.get_by_text("At 06:30 on Monday through Friday").wait_for()
    await clean("the preview of a schedule")
    await page.get_by_label("Cron").fill("61 * * * *")
    await page.get_by_role("button", name="Show its next times").click()
    await page.locator("#preview [role=alert]").wait_for()
    await clean("a refused preview")
    await visitor.go("/")
    await page.get_by_text("New topic").click()
    await clean("the form of a new topic")
    for path in (f"/topic?name={EMPTY}", f"/dead?topic={EMPTY}", "/topic?name=nowhere", "/nowhere", "/find?q=tag-2",
                 f"/message?topic={TOPIC}&id=lost-2", f"/message?topic={TOPIC}&id=nobody", "/schedules?q=nothing",
                 f"/schedule?topic={TOPIC}&name=hourly", "/late?since=7d", f"/late?topic={EMPTY}"):  # fmt: skip
        await visitor.go(path)
        await clean(path)
    visitor.troubles.clear()  # the browser notes the statuses 400 and 404


@pytest.mark.prove
async def test_pages_do_not_jump_while_they_load(visitor: Visitor) -> None:
    shifted = """() => new Promise(done => {
        let sum = 0;
        new PerformanceObserver(list => list.getEntries().forEach(one => { if (!one.hadRecentInput) sum += one.value }))
            .observe({ type: "layout-shift", buffered: true });
        requestAnimationFrame(() => requestAnimationFrame(() => done(sum)));
    })"""
    for path in PAGES:
        page = await visitor.go(path)
        assert await page.evaluate(shifted) <= 0.1, path  # what browsers' makers call good


async def test_the_overview_is_live_and_as_the_command_line_has_it(
    visitor: Visitor, stage: Site, tl: timeline.Timeline
) -> None:
    page = await visitor.go("/")
    (told,) = await cli(stage, "top", "--once")
    for topic in told["topics"]:
        row = page.locator("tbody tr").filter(has=page.get_by_role("link", name=topic["name"], exact=True))
        cells = [cell.replace(",", "") for cell in await row.locator("td").all_inner_texts()]
        assert cells[1] == str(topic["due"]) and cells[5] in (str(topic["waiting"]), "…"), cells
    assert re.search(r"\b\d{1,2} in the next hour", await visitor.text())  # more of them as minutes pass
    async with tl.producer(TOPIC) as producer:
        await producer.produce_many(timeline.Batch(payloads=[b"x"] * 500, in_="30m", tags="live"))
    more = re.compile(r"\b5\d\d\s+in the next hour")
    await expect(page.locator("#live")).to_contain_text(more, timeout=WAIT_MS, use_inner_text=True)
    async with tl.producer(TOPIC) as producer:
        await producer.cancel_tag("live")


async def test_a_page_that_nobody_sees_takes_no_connection(visitor: Visitor) -> None:
    """Browsers have six connections to a site: more pages than that are open without harm."""
    page = await visitor.go("/")
    assert await page.evaluate(HIDE, True) == [2], "closed"
    assert await page.evaluate(HIDE, False) in ([0], [1]), "open again"
    await expect(page.locator("#live")).to_contain_text(TOPIC, timeout=WAIT_MS)


async def test_times_are_in_the_readers_zone_with_utc_on_hover(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go(f"/message?topic={TOPIC}&id=order-3")
    one = await tl.get(TOPIC, "order-3")
    assert one is not None
    shown = page.locator("dt:text-is('Due') + dd time")
    assert (await shown.get_attribute("title") or "").startswith(f"{one.due:%Y-%m-%d %H:%M}")
    assert (await shown.inner_text()).startswith(f"{one.due.astimezone(ZoneInfo('America/New_York')):%Y-%m-%d %H:%M}")
    assert await page.locator("form [name=zone]").first.input_value() == "America/New_York"
    assert "America/New_York" in await page.inner_text("footer")


async def test_keys_go_on_where_more_is_shown(visitor: Visitor) -> None:
    page = await visitor.go(f"/topic?name={TOPIC}&state=waiting")
    shown = await page.locator("#messages a.id").count()
    await page.get_by_role("button", name="Show more").focus()
    await page.keyboard.press("Enter")
    await page.wait_for_selector(f"#messages a.id >> nth={shown}")
    await expect(page.locator("#messages a.id").nth(shown)).to_be_focused(timeout=WAIT_MS)


async def test_somebody_may_have_every_time_in_utc(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go(f"/message?topic={TOPIC}&id=order-3")
    await page.get_by_role("button", name="UTC").click()
    await visitor.go(f"/message?topic={TOPIC}&id=order-4")
    one = await tl.get(TOPIC, "order-4")
    assert one is not None
    assert (await page.inner_text("dt:text-is('Due') + dd time")).startswith(f"{one.due:%Y-%m-%d %H:%M:%S}")
    assert "UTC" in await page.inner_text("footer")
    assert await page.locator("form [name=zone]").first.input_value() == "UTC"


@pytest.mark.prove
async def test_a_link_key_and_a_choice_stay_while_values_come_in(visitor: Visitor) -> None:
    page = await visitor.go("/")
    link = page.locator("#live").get_by_role("link", name=TOPIC, exact=True)
    mark = "name => document.addEventListener(`htmx:${name}`, () => document.body.classList.add(name))"
    await page.evaluate(mark, "sseMessage")
    await link.focus()
    await expect(page.locator("body")).to_have_class(re.compile("sseMessage"), timeout=WAIT_MS)
    assert await link.evaluate("one => one === document.activeElement"), "keys stay where they were"
    await link.select_text()
    await page.evaluate(mark, "sseBeforeMessage")
    await expect(page.locator("body")).to_have_class(re.compile("sseBeforeMessage"), timeout=WAIT_MS)
    assert await page.evaluate("getSelection().toString()") == TOPIC, "what is chosen may be copied"


async def test_a_message_is_produced_moved_delivered_now_and_cancelled(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go(f"/produce?topic={TOPIC}")
    await page.get_by_label("Payload").fill('{"a": 1}')
    await page.get_by_label("It is JSON").check()
    await page.get_by_label("In", exact=True).fill("2h")
    await page.get_by_text("More").click()
    await page.locator("[name=id]").fill("clicked")
    await page.get_by_role("button", name="Put it on the timeline").click()
    await page.get_by_text("clicked is on the timeline of mails.").wait_for()
    await page.get_by_label("Time", exact=True).fill("2031-05-01T09:30")
    await page.get_by_role("button", name="Move").click()
    await page.get_by_text("clicked was moved.").wait_for()
    await page.get_by_role("button", name="Deliver now").click()
    await page.get_by_text("clicked is due now.").wait_for()
    one = await tl.get(TOPIC, "clicked")
    assert one is not None and one.state is State.AVAILABLE and one.headers == {"content-type": "application/json"}
    page.once("dialog", lambda asked: asked.dismiss())
    await page.get_by_role("button", name="Cancel").click()
    assert await tl.get(TOPIC, "clicked") is not None, "it is cancelled only when that is confirmed"
    page.once("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Cancel").click()
    await page.get_by_text("clicked was cancelled.").wait_for()
    assert await tl.get(TOPIC, "clicked") is None


async def test_letters_are_filtered_looked_at_and_revived_over_ten_minutes(
    visitor: Visitor, stage: Site, tl: timeline.Timeline
) -> None:
    """The job: find those of a tag whose reason names a host, look at one, and revive them spread over ten minutes."""
    await tl.create_topic("job")
    await bury(tl, [f"lost-{at}" for at in range(36)], "job")
    page = await visitor.go("/dead?topic=job")
    await page.get_by_role("link", name=re.compile(re.escape(PICKY))).click()
    await page.get_by_role("textbox", name="Tag").fill("autumn")
    await page.get_by_role("button", name="Filter").click()
    await page.get_by_text("12 of 12 match").wait_for()
    (letters,) = [await cli(stage, "dead", "list", "job", "--tag", "autumn")]
    assert len(letters) == 12
    await page.get_by_role("link", name="lost-3", exact=True).click()
    assert PICKY in await visitor.text()
    await page.go_back()
    await visitor.settled()
    await page.get_by_label("spread over").fill("10m")
    await page.get_by_role("button", name="Revive or purge all that match").click()
    page.once("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Revive all 12").click()
    await page.get_by_text("12 revived, spread over 10m.").wait_for()
    due = sorted([one.due_ms async for one in tl.scan("job", state=("waiting", "available"))])
    assert len(due) == 12 and due[-1] - due[0] == 11 * 50_000
    await page.get_by_role("link", name="Show what is left").click()
    await page.get_by_text("No dead letter matches").first.wait_for()


async def test_a_wrong_spread_keeps_the_choice_and_says_why(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("typo")
    await bury(tl, [f"lost-{at}" for at in range(3)], "typo")
    page = await visitor.go("/dead?topic=typo")
    await page.get_by_label("Choose lost-1").check()
    await page.get_by_label("spread over").fill("soon")
    await page.get_by_role("button", name="Revive the chosen 1").click()
    await page.get_by_text("spread must be").wait_for()
    assert await page.get_by_label("Choose lost-1").is_checked()
    visitor.troubles.clear()  # the browser notes the status 400
    await page.get_by_label("spread over").fill("1m")
    await page.get_by_role("button", name="Revive or purge all that match").click()
    await page.get_by_role("button", name="Revive all 3").wait_for()
    spreads = [await one.input_value() for one in await page.get_by_label("spread over").all()]
    assert spreads == ["1m", "1m"], "what was typed may be changed beside the button"


async def test_letters_are_chosen_one_by_one_and_purged(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("chosen")
    await bury(tl, [f"lost-{at}" for at in range(6)], "chosen")
    page = await visitor.go("/dead?topic=chosen")
    purge = page.get_by_role("button", name="Purge the chosen")
    assert await purge.is_disabled()
    await page.get_by_label("Choose lost-2").check()
    await page.get_by_label("Choose lost-4").check()
    page.once("dialog", lambda asked: asked.accept())
    await purge.click()
    await page.get_by_text("2 deleted for good.").wait_for()
    assert {one.id async for one in tl.dead("chosen")} == {"lost-0", "lost-1", "lost-3", "lost-5"}
    await visitor.go("/dead?topic=chosen")
    await page.get_by_label("Choose all that are shown").check()
    await page.get_by_role("button", name="Revive the chosen 4").click()
    await page.get_by_text("4 revived.").wait_for()
    assert [one.id async for one in tl.dead("chosen")] == []


async def test_a_list_goes_on_after_a_call_that_failed(visitor: Visitor) -> None:
    page = await visitor.go(f"/topic?name={TOPIC}&state=waiting")
    more = page.get_by_role("button", name="Show more")
    await more.wait_for()
    rows = await page.locator("#messages tr").count()
    await page.context.set_offline(True)
    await more.click()
    await expect(page.locator("#connection")).to_be_visible()
    await page.context.set_offline(False)
    await more.click()
    await expect(page.locator("#connection")).to_be_hidden()
    await expect(page.locator(f"#messages tr:nth-child({rows + 1})")).to_be_attached()
    visitor.troubles.clear()  # the browser tells the lost call


async def test_all_messages_of_a_tag_are_moved_even_if_a_call_is_lost(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("campaigns")
    async with tl.producer("campaigns") as producer:
        batch = timeline.Batch(payloads=[b"x"] * 20, in_="30d", tags=["spring"] * 20)
        (await producer.produce_many(batch)).raise_failed()
    page = await visitor.go("/topic?name=campaigns&tag=spring")
    await page.context.set_offline(True)
    await page.get_by_role("button", name="Count, to move").click()
    await expect(page.locator("#connection")).to_be_visible()
    await page.context.set_offline(False)
    await page.get_by_role("button", name="Count, to move").click()
    await page.locator("#tagged input[name=in]").fill("90d")
    page.once("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Move all 20").click()
    await expect(page.locator("#tagged")).to_contain_text("20 moved.")
    dues = [one.due async for one in tl.scan("campaigns")]
    assert len(dues) == 20 and min(dues) > datetime.now(UTC) + timedelta(days=80)
    visitor.troubles.clear()  # the browser tells the lost call


async def test_why_a_reminder_was_late_is_three_clicks_away(visitor: Visitor, tl: timeline.Timeline) -> None:
    await tl.create_topic("reminders")
    async with tl.producer("reminders") as producer:
        now_ms = (await tl.standing()).brokers[0].now_ms
        await producer.produce(b"", id="reminder-of-customer-815", at=now_ms - 120_000)
    (one,) = await tl.take("reminders", 1, "20s")
    await tl.settle([one.receipt], "ack")
    page = await visitor.go("/")
    await page.get_by_label("Find a message by its id or tag").fill("customer-815")
    await page.get_by_role("button", name="Find").click()
    await page.get_by_role("heading", name="reminder-of-customer-815").wait_for()
    text = await visitor.text()
    assert "late: it was put or moved too late" in text and "It is no longer on the timeline" in text


async def test_settings_and_pause(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go("/")
    await page.get_by_text("New topic").click()
    await page.get_by_label("Name", exact=True).fill("clicked-topic")
    await page.get_by_role("button", name="Create").click()
    await page.get_by_text("Topic clicked-topic is there.").wait_for()
    await page.get_by_text("Settings", exact=True).click()
    await page.get_by_label("max_rate_per_s").fill("50")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_text("Changed: max_rate_per_s.").wait_for()
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_text("clicked-topic is paused: nothing is delivered.").wait_for()
    settings = next(each.settings for each in await tl.topics() if each.name == "clicked-topic")
    assert settings.max_rate_per_s == 50 and settings.paused


async def test_a_schedule_is_made_with_a_preview(visitor: Visitor, tl: timeline.Timeline) -> None:
    page = await visitor.go("/schedules")
    await page.get_by_text("New schedule").click()
    await page.get_by_label("Name", exact=True).fill("by-hand")
    await page.get_by_label("Cron").fill("30 6 * * 1-5")
    await page.get_by_role("button", name="Show its next times").click()
    await page.get_by_text("At 06:30 on Monday through Friday, in America/New_York").wait_for()
    await page.get_by_role("button", name="Create", exact=True).click()
    await page.get_by_text("by-hand is there.").wait_for()
    page.once("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Delete").click()
    await page.get_by_text("by-hand was deleted.").wait_for()
    assert await tl.get_schedule(TOPIC, "by-hand") is None


@pytest.mark.prove
async def test_two_browsers_at_once(stage: Site, require_service: Callable[[str], None], tl: timeline.Timeline) -> None:
    """What one does, the other sees; and what the other asked on an old page is refused."""
    require_service("chromium")
    async with tl.producer(TOPIC) as producer:
        await producer.produce(b"", id="shared", in_="1h")
    async with chromium() as browser, window(browser, stage.url) as one, window(browser, stage.url) as other:
        for visitor in (one, other):
            await visitor.go(f"/message?topic={TOPIC}&id=shared")
        await one.page.get_by_label("In", exact=True).fill("3h")
        await one.page.get_by_role("button", name="Move").click()
        await one.page.get_by_text("shared was moved.").wait_for()
        await other.page.get_by_role("button", name="Deliver now").click()
        await other.page.get_by_role("heading", name="It has changed since").wait_for()
        assert "shared" in await (await other.go(f"/messages?topic={TOPIC}&prefix=shared")).inner_text("body")


@asynccontextmanager
async def mortal(
    folder: Path,
) -> AsyncIterator[tuple[Visitor, Callable[[], object], Callable[[], AbstractContextManager[Any]]]]:
    """A window at a gateway whose broker can be killed, and run again on the same store and port."""
    store = f"sqlite:///{folder / 'store.db'}"
    with broker(folder, "--store", store) as served, gateway(folder, served["listen"]) as opened:
        async with timeline.connect(served["listen"]) as tl:
            await fill(tl)

        def kill() -> None:
            served["process"].kill()
            served["process"].wait()

        again = partial(broker, folder, "--store", store, "--listen", served["listen"])
        async with chromium() as browser, window(browser, f"http://{opened['listen']}") as visitor:
            yield visitor, kill, again


@pytest.mark.prove
async def test_a_broker_is_killed_while_a_page_is_open(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    """The page says so, keeps what it had, and goes on when the broker is back."""
    require_service("chromium")
    async with mortal(tmp_path) as (visitor, kill, again):
        page = await visitor.go("/")
        kill()
        await page.locator("#live .banner.bad").first.wait_for()
        assert TOPIC in await page.inner_text("#live"), "what was known stays"
        with again():
            await page.locator("#live .banner.bad").first.wait_for(state="detached")
            await expect(page.locator("#live")).to_contain_text(f"{WAITING}", timeout=WAIT_MS)


@pytest.mark.prove
async def test_a_broker_is_killed_while_somebody_works(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    """Lists, forms and work on many letters say so, keep what was typed and chosen, and go on when it is back."""
    require_service("chromium")
    async with mortal(tmp_path) as (visitor, kill, again):
        page = await visitor.go(f"/dead?topic={TOPIC}")
        await page.get_by_role("button", name="Revive or purge all that match").click()
        await page.get_by_role("button", name="Purge all 30").wait_for()
        form = await page.context.new_page()
        await form.goto(f"{visitor.url}/produce?topic={TOPIC}")
        await form.get_by_label("Payload").fill("written before")
        await form.get_by_label("In", exact=True).fill("1h")
        kill()
        page.once("dialog", lambda asked: asked.accept())
        await page.get_by_role("button", name="Purge all 30").click()
        await form.get_by_role("button", name="Put it on the timeline").click()
        await form.get_by_role("alert").first.wait_for()
        assert await form.get_by_label("Payload").input_value() == "written before"
        await page.get_by_role("button", name="Go on from here").wait_for()
        with again():
            await page.get_by_role("button", name="Go on from here").click()
            await page.get_by_text("30 deleted for good.").wait_for()
            await form.get_by_role("button", name="Put it on the timeline").click()
            await form.get_by_text(f"is on the timeline of {TOPIC}.").wait_for()


@pytest.mark.prove
async def test_somebody_logs_in_and_out(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    """Live values and actions go with the token of the cookie."""
    require_service("chromium")
    tokens = Tokens(tmp_path)
    token = tokens.add("ops", "produce", "consume", "admin", "operator", "schedule")
    with broker(tmp_path, "--tokens", str(tokens.path)) as served, gateway(tmp_path, served["listen"]) as opened:
        async with timeline.connect(served["listen"], token=token) as tl:
            await fill(tl)
        async with chromium() as browser, window(browser, f"http://{opened['listen']}") as visitor:
            page = await visitor.go(f"/topic?name={TOPIC}")
            await page.get_by_label("Token").fill(token)
            await page.get_by_role("button", name="Log in").click()
            await page.get_by_role("heading", name=TOPIC, exact=True).wait_for()
            await visitor.go("/")
            await expect(page.locator("#live")).to_contain_text(f"{WAITING}", timeout=WAIT_MS)
            assert token not in await page.evaluate("document.cookie + document.documentElement.outerHTML")
            await page.route("http://elsewhere.test/", lambda route: route.fulfill(
                content_type="text/html", body=f'<a href="{visitor.url}/topic?name={TOPIC}">look</a>'
            ))  # fmt: skip
            await page.goto("http://elsewhere.test/")
            await page.get_by_text("look").click()
            await page.get_by_role("heading", name=TOPIC, exact=True).wait_for()
            await visitor.go("/")
            await page.evaluate(HIDE, True)
            await page.context.clear_cookies(name="timeline_token")
            await page.evaluate(HIDE, False)
            await page.get_by_role("heading", name="Log in").wait_for()
            assert "next=" in page.url, "a page whose token is gone asks for one by itself"
            await page.get_by_label("Token").fill(token)
            await page.get_by_role("button", name="Log in").click()
            await page.get_by_role("button", name="Log out").click()
            await page.get_by_text("You are logged out.").wait_for()
            await visitor.page.goto(f"{visitor.url}/")
            await page.get_by_role("heading", name="Log in").wait_for()
            assert visitor.troubles == []
