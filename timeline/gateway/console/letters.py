"""Dead letters: their reasons counted, those that match found, and all of them revived or purged in steps.

A step reads a bounded number of letters. Its answer has the form of the next one, which the browser sends by itself. So
nothing is kept here between two steps, a million letters block nobody, and a page that is closed stops the work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from litestar import Response, get, post

from timeline.columns import Bools
from timeline.driver.receipts import Receipts
from timeline.driver.times import duration_ms
from timeline.errors import Invalid, Throttled, TimelineError, Unavailable, Unknown
from timeline.gateway.clients import CallerClient
from timeline.gateway.console.live import event
from timeline.gateway.console.rendering import part
from timeline.gateway.console.search import begins_with, search
from timeline.gateway.console.visit import Fields, Visit, sentence, visiting
from timeline.gateway.problems import ClientGone
from timeline.gateway.putting import why_failed
from timeline.gateway.requests import ApiRequest, Streamed, while_connected
from timeline.gateway.routes.reading import read_cursor, shown_cursor
from timeline.gateway.service import HttpGateway, gateway_of
from timeline.gateway.streams import EVENT_STREAM
from timeline.model import Status

STOPPED = "the brokers did not answer for all of them"
STEP_ROWS = 20_000
"""Dead letters that one step reads."""
STEP_MS = 1_000.0
"""A step ends after this time, with the page that it reads then."""
STEP_CHANGES = 2_000
"""Dead letters that one step changes, at most a page of the scan more."""
COUNTED = 1_000
"""Letters of a topic that are counted in the list of topics."""
SAMPLE = 5_000
"""Letters whose reasons are counted before anybody asks for all."""
TOLD_MS = 200.0
"""How far apart the counts are shown while they grow."""
REASONS_SHOWN = 30
REASONS_KEPT = 2_000
"""Different reasons that are counted apart. Numbers and ids in them are read as one and the same."""
VARIES = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|0x[0-9a-f]+|[0-9]+(?:[.:,][0-9]+)*", re.IGNORECASE)
OTHERS = ""
"""Stands for the kinds that are not counted apart, and for letters without a reason."""
DEEDS = ("revive", "purge")
AGAIN = (Status.UNAVAILABLE, Status.UNKNOWN, Status.THROTTLED)
"""What letters may meet that are to be asked for again."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters of a topic are wanted. The tag and the kind of reason are exact. `reason` is a part of the
    reason, and `prefix` the beginning of the id."""

    topic: str
    tag: str = ""
    reason: str = ""
    kind: str = ""
    prefix: str = ""
    died_from: str = ""
    died_to: str = ""
    zone: str = ""

    @classmethod
    def of(cls, fields: Fields) -> Filter:
        """Return the filter that a query or a form has. Raise Invalid for a time that is none."""
        exact = {name: fields.exact(name) for name in ("topic", "tag", "reason", "kind", "prefix")}
        found = cls(**exact, **{name: fields.text(name) for name in ("died_from", "died_to", "zone")})
        found.died_ms()
        return found

    def fields(self) -> dict[str, str]:
        """Return the filter's fields, as links and forms carry them."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def plain(self) -> bool:
        """Whether the store chooses all by itself."""
        return not (self.reason or self.kind or self.prefix or self.died_from or self.died_to)

    def of_kind(self, kind: str) -> dict[str, str]:
        """Return the fields of a filter for those among them whose reason is of a kind."""
        return {**self.fields(), "kind": kind}

    def died_ms(self) -> tuple[int | None, int | None]:
        """Return between which times they died. None: no bound."""
        given = Fields({name: [value] for name, value in self.fields().items()})
        return given.instant_ms("died_from"), given.instant_ms("died_to")

    def matches(self, rows: Any) -> Bools:
        """Return which rows of a page match. The store has chosen by tag before."""
        chosen = np.ones(len(rows), dtype=np.bool_)
        low, high = self.died_ms()
        if low is not None:
            chosen &= rows.died_ms >= low
        if high is not None:
            chosen &= rows.died_ms < high
        if self.prefix:
            chosen &= begins_with(rows, self.prefix.encode())
        if self.reason:
            wanted = self.reason.lower()
            reasons = (reason.decode(errors="replace").lower() for reason in rows.dead.tolist())
            chosen &= np.array([wanted in reason for reason in reasons], dtype=np.bool_)
        if self.kind:
            chosen &= np.array([kind_of(reason) == self.kind for reason in rows.dead.tolist()], dtype=np.bool_)
        return chosen

    def scan(self, client: CallerClient, limit: int, cursor: bytes) -> Any:
        """Return the pages of dead letters of the tag from a cursor on."""
        return client.timeline.scan_pages(self.topic, state="dead", tag=self.tag or None, limit=limit, cursor=cursor)


@get("/dead", include_in_schema=False)
async def dead(request: ApiRequest) -> Response[bytes]:
    """Show the dead letters of a topic: a form that chooses, the reasons, and a list that loads by itself."""
    async with visiting(request) as visit:
        chosen = Filter.of(visit.query)
        names = [each.name for each in await visit.timeline.topics()]
        if not chosen.topic:
            return visit.page("dead_topics.html", names=names)
        await visit.topic(chosen.topic)
        return visit.page("dead.html", chosen=chosen, every=visit.query.has("every"), names=names)


@get("/dead/count", include_in_schema=False)
async def count(request: ApiRequest) -> Response[bytes]:
    """Show how many dead letters a topic has, as a part of the list of topics."""
    async with visiting(request) as visit:
        chosen, found = Filter.of(visit.query), 0
        async with aclosing(chosen.scan(visit.client, COUNTED, b"")) as pages:
            async for page in pages:
                found += len(page.rows)
        return visit.page("_dead_count.html", found=found, most=COUNTED)


@get("/dead/letters", include_in_schema=False)
async def letters(request: ApiRequest) -> Response[bytes]:
    """Show some letters that match, as a part of the page."""
    async with visiting(request) as visit:
        chosen = Filter.of(visit.query)
        wanted = None if chosen.plain else chosen.matches
        found = await search(visit, "/dead/letters", chosen.fields(), partial(chosen.scan, visit.client), wanted)
        return visit.page("_letters.html", chosen=chosen, found=found)


@get("/dead/reasons", include_in_schema=False)
async def reasons(request: ApiRequest) -> Streamed:
    """Count the letters by reason, and show the counts while they grow."""
    return Streamed(_reasons(request, gateway_of(request)), 200, EVENT_STREAM)


async def _reasons(request: ApiRequest, gateway: HttpGateway) -> AsyncGenerator[bytes, None]:
    async with visiting(request) as visit:
        try:
            chosen, every = Filter.of(visit.query), visit.query.has("every")
            counts: Counter[str] = Counter()
            read, done, told_ms = 0, False, -TOLD_MS
            async with aclosing(chosen.scan(visit.client, 0 if every else SAMPLE, b"")) as pages:
                while not done:
                    page: Any = await while_connected(request, anext(pages, None), gateway.ending)
                    if gateway.stopping.is_set():
                        return  # the browser asks again
                    if page is not None:
                        matching = page.rows.take(np.flatnonzero(chosen.matches(page.rows)))
                        _count(counts, matching.dead.tolist())
                        read += len(page.rows)
                    done = page is None or not page.cursor or (not every and read >= SAMPLE)
                    partly = done and page is not None and bool(page.cursor)
                    if done or gateway.clock.monotonic_ms() >= told_ms + TOLD_MS:
                        told_ms = gateway.clock.monotonic_ms()
                        yield event("reasons", _told(chosen, counts, read, done, partly, every))
            yield event("end", "end")
        except ClientGone:
            return
        except TimelineError as trouble:
            yield event("reasons", part("_trouble.html", sentence=sentence(trouble)))
            yield event("end", "end")


def _count(counts: Counter[str], reasons: list[bytes]) -> None:
    for reason, count in Counter(reasons).items():
        kind = kind_of(reason)
        if kind not in counts and len(counts) >= REASONS_KEPT:
            kind = OTHERS
        counts[kind] += count


def kind_of(reason: bytes) -> str:
    """Return what a reason has in common with those that differ from it in numbers and ids alone."""
    return " ".join(VARIES.sub("…", reason.decode(errors="replace")).split())


def _told(chosen: Filter, counts: Counter[str], read: int, done: bool, partly: bool, every: bool) -> str:
    most = [(kind, count) for kind, count in counts.most_common(REASONS_SHOWN) if kind != OTHERS]
    rest = sum(counts.values()) - sum(count for _, count in most)
    values = {"reasons": most, "rest": rest, "read": read, "done": done, "partly": partly, "every": every}
    return part("_reasons.html", chosen=chosen, **values)


@dataclass(frozen=True, slots=True)
class LettersWork:
    """How far it has come to count, revive or purge letters. `total`: how many were counted, over which `spread_ms` is
    divided, from `base_ms` on. `until_ms`: when the count began, on the broker's clock. Letters that died after it are
    left alone. `at`, `due_zone`, `spread`: when they shall be due, as it was typed."""

    deed: str
    cursor: bytes = b""
    read: int = 0
    matched: int = 0
    done: int = 0
    failed: int = 0
    total: int = 0
    base_ms: int = 0
    spread_ms: int = 0
    until_ms: int = 0
    why: str = ""
    at: str = ""
    due_zone: str = ""
    spread: str = ""

    @classmethod
    def of(cls, form: Fields, now_ms: int) -> LettersWork:
        """Return the work of a step's form. Raise Invalid."""
        deed = form.text("do")
        if deed not in ("count", *DEEDS):
            raise Invalid(f"do is count, revive or purge, not {deed!r:.40}")
        numbers: dict[str, Any] = {
            name: form.number(name) for name in ("read", "matched", "done", "failed", "total", "until_ms")
        }
        texts: dict[str, Any] = {name: form.text(name) for name in ("why", "at", "due_zone", "spread")}
        picked_ms = form.with_(zone=texts["due_zone"]).instant_ms("at")
        base_ms = form.number("base_ms") or picked_ms or now_ms
        spread_ms = form.number("spread_ms") or duration_ms(texts["spread"] or "0s", "spread")
        if deed == "count":
            base_ms = spread_ms = 0  # what is typed beside the button counts
        return cls(deed, read_cursor(form.text("cursor")), **numbers, base_ms=base_ms, spread_ms=spread_ms, **texts)

    def fields(self) -> dict[str, str | int]:
        """Return what the form of the next step carries."""
        carried: dict[str, str | int] = {name: getattr(self, name) for name in self.__slots__}
        del carried["deed"]
        return carried | {"do": self.deed, "cursor": shown_cursor(self.cursor) or ""}

    def due_ms(self, count: int) -> list[int]:
        """Return when the next `count` letters are due: evenly spread in the order in which they are found."""
        total = max(self.total, 1)
        places = range(self.done + self.failed, self.done + self.failed + count)
        return [self.base_ms + self.spread_ms * min(at, total) // total for at in places]


@post("/dead/step", include_in_schema=False)
async def step(request: ApiRequest) -> Response[bytes]:
    """Do one step of counting, reviving or purging the letters that match, and offer the next one."""
    async with visiting(request) as visit:
        form = await visit.form()
        chosen, work = Filter.of(form), LettersWork.of(form, visit.gateway.clock.now_ms())
        ids = form.texts("id")
        if work.deed in DEEDS and not ids and not work.total:
            raise Invalid("count all that match first, then revive or purge them")
        if work.deed == "count" and ids:
            raise Invalid("those that match are counted, not those that are chosen")
        left: list[str] = []
        if ids:
            work, trouble, left = await _of_ids(visit, chosen, work, ids)
        else:
            work, trouble = await _stepped(visit, chosen, work)
        return visit.page("_work.html", chosen=chosen, work=work, ids=left, trouble=trouble)


async def _stepped(visit: Visit, chosen: Filter, work: LettersWork) -> tuple[LettersWork, str]:
    """Return the work after one step, and why it stopped before its end. Then the same step goes on with the rest."""
    begun, end_ms = work.done + work.failed, visit.gateway.clock.monotonic_ms() + STEP_MS
    try:
        async with aclosing(chosen.scan(visit.client, STEP_ROWS, work.cursor)) as pages:
            async for page in pages:
                work = replace(work, until_ms=work.until_ms or page.now_ms)
                rows = page.rows.take(np.flatnonzero(chosen.matches(page.rows) & (page.rows.died_ms <= work.until_ms)))
                if work.deed in DEEDS:
                    for group, ids in _by_group(rows).items():
                        work, again = await _change(visit, chosen.topic, group, ids, work)
                        if again:
                            return work, STOPPED
                read, matched = work.read + len(page.rows), work.matched + len(rows)
                work = replace(work, cursor=page.cursor, read=read, matched=matched)
                changed = work.done + work.failed - begun
                if not page.cursor or changed >= STEP_CHANGES or visit.gateway.clock.monotonic_ms() >= end_ms:
                    break
    except (Unavailable, Unknown, Throttled) as lost:
        return work, sentence(lost)
    return work, ""


def _by_group(rows: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for id, group in zip(rows.ids.tolist(), rows.groups.tolist(), strict=True):
        found.setdefault(group.decode(), []).append(id.decode())
    return found


async def _of_ids(
    visit: Visit, chosen: Filter, work: LettersWork, ids: list[str]
) -> tuple[LettersWork, str, list[str]]:
    """Return the work on letters that were chosen one by one, why it stopped before its end, and what is left. Each of
    `ids` is a group and an id, as a query has them."""
    by_group: dict[str, dict[str, str]] = {}
    for one in ids:
        fields = Fields.of(one)
        by_group.setdefault(fields.exact("group"), {})[fields.exact("id")] = one
    work = replace(work, total=max(work.total, len(ids)), cursor=b"")
    left: list[str] = []
    trouble = ""
    for group, some in by_group.items():
        try:
            work, again = await _change(visit, chosen.topic, group, [*some], work)
        except (Unavailable, Unknown, Throttled) as lost:
            again, trouble = [*some], sentence(lost)
        left += [some[id] for id in again]
    return work, trouble or (STOPPED if left else ""), left


async def _change(
    visit: Visit, topic: str, group: str, ids: list[str], work: LettersWork
) -> tuple[LettersWork, list[str]]:
    """Return the work after some letters were changed, and which are to be asked for again."""
    async with visit.client.producer(topic, group) as producer:
        if work.deed == "purge":
            receipts: Receipts = await producer.purge(ids)
        elif work.spread_ms:
            receipts = await producer.revive(ids, at=work.due_ms(len(ids)))
        else:
            receipts = await producer.revive(ids, at=work.base_ms)
    failed = [*receipts.failed]
    again = [one.id for one in failed if one.status in AGAIN]
    refused = [one for one in failed if one.status not in AGAIN]
    why = work.why or (f"{refused[0].id}: {why_failed(refused[0])}" if refused else "")
    done, refusals = work.done + len(receipts) - len(failed), work.failed + len(refused)
    return replace(work, done=done, failed=refusals, why=why), again
