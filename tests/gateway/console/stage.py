"""A console with something to see, and browsers that look at it."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

import timeline

TOPIC, EMPTY = "mails", "quiet"
WAITING, DEAD = 120, 30
PAYLOAD = b'{"to": "ada", "lines": [1, 2]}'
PICKY = "smtp.example.org"
WAIT_MS = 60_000
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


async def fill(tl: timeline.Timeline) -> None:
    """Put what the pages show: messages that wait, dead letters of two reasons and tags, and two schedules."""
    await tl.create_topic(TOPIC)
    await tl.create_topic(EMPTY, paused=True)
    json = {"content-type": "application/json"}
    async with tl.producer(TOPIC) as producer:
        for at in range(WAITING):
            await producer.produce(PAYLOAD, id=f"order-{at}", in_=f"{at + 60}m", tag=f"tag-{at % 4}", headers=json)
        await bury(tl, [f"lost-{at}" for at in range(DEAD)])
    await tl.schedule(TOPIC, "daily", cron="0 9 * * *", zone="Europe/Berlin", payload=b"good morning")
    await tl.schedule(TOPIC, "hourly", every="1h", payload=b"look", paused=True)


async def bury(tl: timeline.Timeline, ids: list[str], topic: str = TOPIC, reason: str = "") -> None:
    """Make dead letters: every third is of tag `autumn` and was refused by `PICKY`, the others are of tag `spring`."""
    async with tl.producer(topic) as producer:
        for at, id in enumerate(ids):
            await producer.produce(PAYLOAD, id=id, in_=0, tag="spring" if at % 3 else "autumn")
    left = set(ids)
    while left:
        for one in await tl.take(topic, 100, "20s", lease="5m"):
            told = reason or ("504 after 31 s" if one.tag == "spring" else f"{PICKY} refused it: 550 no user 17")
            (receipt,) = await tl.settle([one.receipt], "bury", reason=told)
            receipt.raise_failed()
            left.discard(one.id)


class Visitor:
    """A browser's window. `troubles`: what its console had to complain about, which must be nothing."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.troubles: list[str] = []
        page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))

    async def go(self, path: str) -> Page:
        """Show a page of the console, until what it loads by itself is there."""
        await self.page.goto(self.url + path)
        await self.settled()
        return self.page

    async def settled(self) -> None:
        """Wait until nothing loads any more."""
        await expect(self.page.locator(".skeleton, .loading, .htmx-request")).to_have_count(0, timeout=WAIT_MS)

    async def text(self) -> str:
        """What the page says, with single spaces."""
        return re.sub(r"\s+", " ", await self.page.inner_text("body"))


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Debian's Chromium, without a window."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def window(browser: Browser, url: str, **options: Any) -> AsyncIterator[Visitor]:
    """A window of its own, with cookies of its own."""
    context: BrowserContext = await browser.new_context(timezone_id="America/New_York", locale="en-US", **options)
    context.set_default_timeout(WAIT_MS)
    try:
        yield Visitor(await context.new_page(), url)
    finally:
        await context.close()


class Console:
    """The console as a program sees it that has the secret of its forms."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def get(self, path: str, **query: Any) -> httpx.Response:
        """A page."""
        return await self.http.get(path, params=query or None)

    async def post(self, path: str, fields: dict[str, Any], **headers: str) -> httpx.Response:
        """Send a form as its page would."""
        if "timeline_csrf" not in self.http.cookies:
            await self.http.get("/login")
        secret = self.http.cookies["timeline_csrf"]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, data={"csrf": secret} | fields, headers=named)
