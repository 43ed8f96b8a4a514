"""Texts of an attacker, in every place of the console: nothing runs, nothing hides, nothing reaches elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlencode

import pytest

import timeline
from tests.gateway.conftest import Site
from tests.gateway.console.stage import Visitor, chromium, window
from timeline.model import State

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOPIC, ODD_ONES = "hostile", "odd"
TEXTS = (
    "<script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=1'>",
    "'-alert(1)-'{{7*7}}{% raw %}",
    "javascript:window.hacked=1",
    "&lt;b&gt;&#x3c;script&#x3e;",
    "</textarea></pre></title><svg/onload=window.hacked=1>",
    "safe\u202egnp.exe",
    "zero\u200bwidth\ufeff",
    "..",
    "a/../b?c#d%2e%00",
)
ODD = (" begins", "ends ", "a\nb", "c\r\nd", "zero\u200bwidth", "..", "a/../b?c#d%2e&e=f", "+")
MAX_BYTES = 2 * 1_048_576
LONG = "x" * 1_048_576


async def bury(tl: timeline.Timeline, id: str, text: str, payload: bytes, topic: str = TOPIC) -> None:
    async with tl.producer(topic) as producer:
        await producer.produce(payload, id=id, in_=0, tag=text[:60], headers={"x-evil": text, text: "1"})
    (one,) = await tl.take(topic, 1, "20s")
    await tl.settle([one.receipt], "bury", reason=text)


@pytest.mark.prove
async def test_nothing_of_an_attacker_runs_or_hides(
    stage: Site, tl: timeline.Timeline, require_service: Callable[[str], None]
) -> None:
    require_service("chromium")
    await tl.create_topic(TOPIC, max_payload_bytes=MAX_BYTES)
    ids = []
    for at, text in enumerate(TEXTS):
        for payload in (text.encode(), b'{"a": "' + text.encode().replace(b'"', b"'") + b'"}'):
            for id in (text, f"plain-{at}-{len(payload)}"):
                try:
                    await bury(tl, id, text, payload)
                    ids.append(id)
                except timeline.TimelineError:
                    continue  # no id of a message, so nobody meets it
    await bury(tl, "long", "y" * 900, LONG.encode())
    async with chromium() as browser, window(browser, stage.url) as visitor:
        page = visitor.page
        page.on("dialog", lambda asked: visitor.troubles.append(asked.message))
        page.on(
            "request", lambda asked: None if asked.url.startswith(stage.url) else visitor.troubles.append(asked.url)
        )
        messages = [f"/message?{urlencode({'topic': TOPIC, 'id': id})}" for id in (*dict.fromkeys(ids), "long")]
        others = [f"/find?{urlencode({'q': text})}" for text in TEXTS]
        others += [f"/topic?{urlencode({'name': TOPIC, 'tag': text})}" for text in TEXTS]
        others += [f"/dead?{urlencode({'topic': TOPIC, 'reason': text})}" for text in TEXTS]
        for path in (f"/topic?name={TOPIC}", f"/dead?topic={TOPIC}", "/late", *messages, *others):
            await visitor.go(path)
            assert await page.evaluate("window.hacked") is None, path
            assert await page.locator("main script, main img, main svg").count() == 0, path
            shown = await page.inner_text("body")
            assert not {"\u202e", "\u200b", "\ufeff"} & set(shown), path
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert await page.evaluate("document.title")
        said = [one for one in visitor.troubles if "status of 404" not in one]
        assert said == []


@pytest.mark.prove
async def test_nothing_of_an_attacker_runs_in_schedules_consumers_and_refused_forms(
    stage: Site, tl: timeline.Timeline, require_service: Callable[[str], None]
) -> None:
    require_service("chromium")
    await tl.create_topic("odd-places")
    async with contextlib.AsyncExitStack() as held, chromium() as browser, window(browser, stage.url) as visitor:
        for at, text in enumerate(TEXTS):
            given = {"payload": text.encode(), "tag": text[:60], "headers": {"x": text, "x-evil": text}}
            await tl.schedule("odd-places", f"plan-{at}", every="1h", **given)
            consumer = await held.enter_async_context(tl.consumer("odd-places", id=f"{text} {at}", credit=1))
            held.callback(asyncio.create_task(_idle(consumer)).cancel)
        page = visitor.page
        page.on("dialog", lambda asked: visitor.troubles.append(asked.message))

        async def look(path: str) -> None:
            assert await page.evaluate("window.hacked") is None, path
            assert await page.locator("main script, main img, main svg").count() == 0, path
            assert not {"\u202e", "\u200b", "\ufeff"} & set(await page.inner_text("body")), path

        plans = [f"/schedule?topic=odd-places&name=plan-{at}" for at in range(len(TEXTS))]
        names = [f"/schedules?{urlencode({'topic': text, 'q': text})}" for text in TEXTS]
        filled = [f"/produce?{urlencode({'topic': 'odd-places', 'id': text, 'tag': text})}" for text in TEXTS]
        for path in ("/schedules?topic=odd-places", "/cluster", "/topic?name=odd-places", *plans, *names, *filled):
            await visitor.go(path)
            await look(path)
        await visitor.go("/cluster")
        await page.get_by_text(f"{TEXTS[0]} 0").wait_for()  # the name of a consumer is seen as it is
        for text in TEXTS:
            await visitor.go("/produce?topic=odd-places")
            await page.get_by_label("Payload").fill(text)
            await page.get_by_label("In", exact=True).fill(text[:30])
            await page.get_by_role("button", name="Put it on the timeline").click()
            await page.get_by_role("alert").first.wait_for()
            assert await page.get_by_label("Payload").input_value() == text, "what was written stays"
            await look(text)
            await visitor.go(f"/topic?{urlencode({'name': 'odd-places', 'tag': text})}")
            await page.get_by_role("button", name="Count, to move or cancel them").click()
            await page.get_by_text("may be moved or cancelled").wait_for()
            await look(text)
        said = [one for one in visitor.troubles if "status of 40" not in one]
        assert said == []


async def _idle(consumer: timeline.Consumer) -> None:
    async for _ in consumer:
        raise AssertionError("nothing is due")


async def test_markup_is_seen_as_text(visitor: Visitor, tl: timeline.Timeline) -> None:
    text = TEXTS[0]
    await tl.create_topic(TOPIC, max_payload_bytes=MAX_BYTES)
    async with tl.producer(TOPIC) as producer:
        await producer.produce(text.encode(), id="seen", in_="1h", tag=text[:60], headers={"x": text})
    page = await visitor.go(f"/message?topic={TOPIC}&id=seen")
    assert (await page.inner_text("main")).count(text) >= 3


@pytest.mark.parametrize("id", ODD)
async def test_an_odd_id_is_acted_upon_and_no_other(visitor: Visitor, tl: timeline.Timeline, id: str) -> None:
    await tl.create_topic(ODD_ONES)
    async with tl.producer(ODD_ONES) as producer:
        await producer.produce(b"", id=id, in_="1h", tag="odd")
    page = await visitor.go(f"/message?{urlencode({'topic': ODD_ONES, 'id': id})}")
    page.once("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Cancel").click()
    await page.get_by_text("was cancelled.").wait_for()
    assert await tl.get(ODD_ONES, id) is None
    await bury(tl, id, "it is odd", b"", ODD_ONES)
    page = await visitor.go(f"/dead?{urlencode({'topic': ODD_ONES, 'tag': 'it is odd'})}")
    await page.get_by_label("Choose all that are shown").check()
    await page.get_by_role("button", name="Revive the chosen 1").click()
    await page.get_by_text("1 revived.").wait_for()
    one = await tl.get(ODD_ONES, id)
    assert one is not None and one.state is not State.DEAD
    async with tl.producer(ODD_ONES) as producer:
        await producer.cancel(id)
