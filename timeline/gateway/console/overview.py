"""Pages about the whole: topics and their load, brokers and consumers, what was late, and finding a message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
from litestar import Response, get

from timeline.driver.late import HAPPENED, LateDelivery, causes_of, late_rows, newest, of_cause
from timeline.driver.message import StoredMessage
from timeline.driver.queries import STATES, messages_of
from timeline.errors import Invalid, TimelineError
from timeline.gateway.console.live import TOPICS_AHEAD, look_of, looks
from timeline.gateway.console.rendering import advice, link
from timeline.gateway.console.visit import Visit, sentence, visiting
from timeline.gateway.requests import ApiRequest, Streamed
from timeline.gateway.service import gateway_of
from timeline.gateway.streams import EVENT_STREAM
from timeline.model import MAX_BATCH
from timeline.watcher import largest_of, outlooks_of

WINDOWS = {"1h": "1m", "24h": "15m", "7d": "2h"}
"""Windows of a chart, each with its step."""
SINCE = ("10m", "1h", "6h", "24h", "7d")
LATE_SHOWN = 100
FOUND = 20
"""Messages of a tag that a search shows, of each topic, and due ones by a part of their id, of all."""
DUE_READ = 1_000
"""Due messages of a topic whose ids are looked at."""
DUE_MS = 500.0
"""How long due messages are looked for. Their ids are in no index."""
TOPICS_AT_ONCE = 20
"""Topics that are searched at a time."""
LATE_KNOWN = "36500d"


@get("/", include_in_schema=False)
async def overview(request: ApiRequest) -> Response[bytes]:
    """Show topics, the coming load, and how the brokers fare."""
    async with visiting(request) as visit:
        return visit.page("overview.html", look=await look_of(visit.client), windows=WINDOWS)


@get("/live", include_in_schema=False)
async def live(request: ApiRequest) -> Streamed:
    """Show the same again every two seconds."""
    template = "_brokers.html" if request.query_params.get("part") == "brokers" else "_topics.html"
    return Streamed(looks(request, gateway_of(request), template), 200, EVENT_STREAM)


@get("/load", include_in_schema=False)
async def load(request: ApiRequest) -> Response[dict[str, Any]]:
    """Return the coming load of a topic, or of the largest topics together, for a chart."""
    async with visiting(request) as visit:
        window, topic = visit.query.text("window", "1h"), visit.query.exact("topic")
        if window not in WINDOWS:
            raise Invalid(f"window is one of {', '.join(WINDOWS)}, not {window!r:.40}")
        look = None if topic else await look_of(visit.client)
        names = [topic] if look is None else largest_of(look.seen.topics, TOPICS_AHEAD)
        asked = {name: visit.timeline.forecast(name, window, WINDOWS[window]) for name in names}
        told = [*(await outlooks_of(asked)).values()]
        edges = told[0].edges_ms[:-1].tolist() if told else []
        counts = [sum(column) for column in zip(*(one.counts.tolist() for one in told), strict=False)]
        answer = {
            "starts": [at_ms / 1000 for at_ms in edges],
            "counts": counts,
            "overdue": sum(one.overdue for one in told),
            "exact": all(one.exact for one in told),
            "largest": TOPICS_AHEAD if look is not None and look.partly else 0,
        }
        return Response(answer, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


@get("/cluster", include_in_schema=False)
async def cluster(request: ApiRequest) -> Response[bytes]:
    """Show the brokers, their clocks, and the consumers."""
    async with visiting(request) as visit:
        return visit.page("cluster.html", look=await look_of(visit.client))


@get("/late", include_in_schema=False)
async def late(request: ApiRequest) -> Response[bytes]:
    """Show what was late, by cause."""
    async with visiting(request) as visit:
        since = visit.query.text("since", "1h")
        topic, cause = visit.query.exact("topic"), visit.query.text("cause")
        rows, unreachable = await late_rows(visit.timeline._context, since, topic, "", MAX_BATCH)
        chosen = rows if not cause else rows.take(of_cause(rows, cause))
        return visit.page(
            "late.html",
            since=since,
            spans=SINCE if since in SINCE else (*SINCE, since),
            topic=topic,
            cause=cause,
            causes=[(one, count, HAPPENED[one], advice(one, over=True)) for one, count in causes_of(rows).items()],
            dropped=rows.dropped,
            unreachable=unreachable,
            deliveries=newest(chosen, LATE_SHOWN),
            more=max(0, len(chosen) - LATE_SHOWN),
        )


@get("/find", include_in_schema=False)
async def find(request: ApiRequest) -> Response[bytes]:
    """Find messages by id or by tag, in all topics. Of due ones and of late deliveries, also by a part of the id."""
    async with visiting(request) as visit:
        wanted = visit.query.exact("q")
        if not wanted:
            return visit.back("/")
        names = [each.name for each in await visit.timeline.topics()]
        found = []
        for at in range(0, len(names), TOPICS_AT_ONCE):
            found += await asyncio.gather(*(_found_in(visit, each, wanted) for each in names[at : at + TOPICS_AT_ONCE]))
        messages = [one for some, _, _ in found for one in some]
        troubles = sorted({trouble for _, trouble, _ in found if trouble})
        further = [name for name, (_, _, more) in zip(names, found, strict=True) if more]
        known, unreachable = await _late_of(visit, wanted)
        troubles += [f"{one} did not answer: what was late there is missing here" for one in unreachable]
        partly = False
        if not messages:
            messages, partly = await _due_of(visit, wanted)
        tagged = any(one.tag == wanted for _, one in messages)
        exact = [name for name, one in messages if one.id == wanted]
        if len(exact) == 1 and not tagged:
            return visit.back(link("/message", topic=exact[0], id=wanted))
        alike = {*((name, one.id) for name, one in messages), *((one.topic, one.id) for one in known)}
        if len(alike) == 1 and not (troubles or tagged or partly):
            ((topic, id),) = alike
            return visit.back(link("/message", topic=topic, id=id))
        return visit.page(
            "find.html",
            wanted=wanted,
            messages=messages,
            known=known,
            troubles=troubles,
            further=further,
            partly=partly,
        )


async def _found_in(visit: Visit, topic: str, wanted: str) -> tuple[list[tuple[str, StoredMessage]], str, bool]:
    """Return the messages of a topic whose id or tag is `wanted`, why others could not be looked for, and whether more
    have this tag."""
    found: list[StoredMessage] = []
    more = False
    try:
        with suppress(Invalid):  # no id can be so long
            one = await visit.timeline.get(topic, wanted, payload=False)
            found += [] if one is None else [one]
        with suppress(Invalid):  # no tag can be so long
            async for page in visit.timeline.scan_pages(topic, state=STATES, tag=wanted, limit=FOUND):
                found += [message for message in messages_of(page) if message.id != wanted]
                more = bool(page.cursor)
    except TimelineError as trouble:
        return [(topic, message) for message in found], f"{topic}: {sentence(trouble)}", more
    return [(topic, message) for message in found], "", more


async def _due_of(visit: Visit, wanted: str) -> tuple[list[tuple[str, StoredMessage]], bool]:
    """Return due messages whose id contains a text, and whether some were not looked at."""
    clock, found = visit.gateway.clock, []
    end_ms = clock.monotonic_ms() + DUE_MS
    for topic in [one.name for one in (await look_of(visit.client)).seen.topics if one.due]:
        left = DUE_READ
        scan: Any = visit.timeline.scan_pages(topic, state="available", limit=DUE_READ)
        async with aclosing(scan) as pages:
            async for page in pages:
                found += [(topic, message) for message in messages_of(page) if wanted in message.id]
                left -= len(page.rows)
                if clock.monotonic_ms() >= end_ms or len(found) >= FOUND:
                    return found[:FOUND], True
        if left <= 0:
            return found, True
    return found, False


async def _late_of(visit: Visit, wanted: str) -> tuple[Sequence[LateDelivery], Sequence[str]]:
    """Return the late deliveries whose id contains a text, the newest first, and which brokers did not answer."""
    rows, unreachable = await late_rows(visit.timeline._context, LATE_KNOWN, "", "", MAX_BATCH)
    part = wanted.encode(errors="replace")
    found = rows.take(np.array([part in id for id in rows.ids.tolist()], dtype=np.bool_))
    return newest(found, LATE_SHOWN), unreachable
