"""Questions: what is on a timeline, what comes due, what was late and why, and how the brokers fare."""

from __future__ import annotations

import base64
import binascii
from contextlib import aclosing
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import Parameter, QueryParameter

from timeline.driver.late import LateDelivery, causes_of, late_rows, newest
from timeline.driver.queries import messages_of
from timeline.driver.times import When, iso
from timeline.errors import Invalid
from timeline.gateway.clients import CallerClient
from timeline.gateway.problems import documented
from timeline.gateway.requests import ApiRequest
from timeline.gateway.routes.messages import stored
from timeline.gateway.shapes import (
    ClusterAnswer,
    ForecastAnswer,
    ForecastStep,
    LateMessage,
    LateMessages,
    StoredMessages,
    WhyAnswer,
)
from timeline.gateway.values import instant, length, text_of
from timeline.model import MAX_BATCH, Status

MAX_LIMIT = 1_000
PAGE_BYTES = 4 * 1024 * 1024
"""Payloads of one page. It ends with the message that reaches them, or soon after."""
NO_CURSOR = "this is no cursor: give it as the page before had it"
Limit = Annotated[int, Parameter(ge=1, le=MAX_LIMIT, description="The most messages of one page.")]
Cursor = Annotated[str | None, Parameter(description="Of the page before, which this one continues.")]
States = Annotated[
    list[str] | None,
    QueryParameter(name="state", description="waiting, available, leased or dead; repeatable. Default: all but dead."),
]


def read_cursor(shown: str | None) -> bytes:
    """Return a cursor as the driver has it. Raise Invalid."""
    try:
        return base64.b64decode(shown or "", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise Invalid(NO_CURSOR) from None


def shown_cursor(cursor: bytes | None) -> str | None:
    """Return a cursor for an answer. None: the end."""
    return base64.urlsafe_b64encode(cursor).decode() if cursor else None


async def _page(
    request: ApiRequest, client: CallerClient, topic: str, limit: int, cursor: str | None, **asked: Any
) -> StoredMessages:
    after = read_cursor(cursor)
    if asked["payload"]:
        await request.begin_large()
    found, seen_bytes = StoredMessages([], None), 0
    pages: Any = client.timeline.scan_pages(text_of(topic), limit=limit, cursor=after, **asked)
    async with aclosing(pages):
        async for page in pages:
            for entry in messages_of(page):
                found.messages.append(stored(entry))
                seen_bytes += len(entry.payload or b"")
            found.cursor = shown_cursor(page.cursor)
            if seen_bytes >= PAGE_BYTES:
                break
    return found


@get(
    "/topics/{topic:str}/messages",
    operation_id="listMessages",
    summary="List messages",
    responses=documented(Status.NOT_FOUND),
)
async def list_(
    request: ApiRequest, client: CallerClient, topic: str, states: States = None, tag: str | None = None,
    due_from: str | None = None, due_to: str | None = None, payload: bool = False, limit: Limit = 100,
    cursor: Cursor = None,
) -> StoredMessages:  # fmt: skip
    """Return a page of messages, in no order. A message that moves meanwhile is seen at least once. With large
    payloads, a page has fewer messages than `limit`. Only a null cursor is the end."""
    due: tuple[When | None, When | None] | None = None
    if due_from is not None or due_to is not None:
        low = None if due_from is None else instant(due_from, "due_from")
        due = low, None if due_to is None else instant(due_to, "due_to")
    return await _page(request, client, topic, limit, cursor, state=states, tag=tag, due=due, payload=payload)


@get(
    "/topics/{topic:str}/dead",
    operation_id="listDeadLetters",
    summary="List dead letters",
    responses=documented(Status.NOT_FOUND),
)
async def dead(
    request: ApiRequest, client: CallerClient, topic: str, tag: str | None = None, payload: bool = False,
    limit: Limit = 100, cursor: Cursor = None,
) -> StoredMessages:  # fmt: skip
    """Return a page of dead letters, each with its reason, in no order."""
    return await _page(request, client, topic, limit, cursor, state="dead", tag=tag, payload=payload)


@get(
    "/topics/{topic:str}/messages/{id:str}/why",
    operation_id="whyMessage",
    summary="Explain why a message was late, or what it waits for",
    responses=documented(Status.NOT_FOUND),
)
async def why(client: CallerClient, topic: str, id: str) -> WhyAnswer:
    """All brokers are asked. Each remembers its newest 10,000 deliveries that were more than 50 ms late."""
    told = await client.timeline.why(text_of(topic), text_of(id))
    return WhyAnswer(
        topic=told.topic,
        id=told.id,
        text=told.lines(),
        late=[late_message(one) for one in told.late],
        kept=None if told.kept is None else late_message(told.kept),
        message=None if told.message is None else stored(told.message),
        unreachable=list(told.unreachable),
    )


def late_message(one: LateDelivery) -> LateMessage:
    """Return a late delivery for an answer."""
    return LateMessage(
        topic=one.topic,
        id=one.id,
        consumer=one.consumer or None,
        due=iso(one.due_ms),
        delivered=iso(one.delivered_ms),
        late_ms=one.delivered_ms - one.due_ms,
        cause=str(one.cause),
        why=one.why,
        advice=one.advice,
    )


@get(
    "/topics/{topic:str}/late",
    operation_id="lateMessages",
    summary="List late deliveries with their causes",
    responses=documented(Status.NOT_FOUND),
)
async def late(client: CallerClient, topic: str, since: str = "1h", limit: Limit = 100) -> LateMessages:
    """Return the newest deliveries that were more than 50 ms late. Causes are counted over all of them."""
    rows, unreachable = await late_rows(
        client.timeline._context, length(since, "since", least_ms=1), text_of(topic), "", MAX_BATCH
    )
    shown = [late_message(one) for one in reversed(newest(rows, limit))]
    causes = {str(cause): count for cause, count in causes_of(rows).items()}
    return LateMessages(shown, causes, rows.dropped, list(unreachable))


@get(
    "/topics/{topic:str}/forecast",
    operation_id="forecast",
    summary="Say how much comes due, and when",
    responses=documented(Status.NOT_FOUND),
)
async def forecast(client: CallerClient, topic: str, window: str = "1h", step: str = "1m") -> ForecastAnswer:
    """Return how many messages come due in each step of the next window."""
    name = text_of(topic)
    outlook = await client.timeline.forecast(
        name, length(window, "window", least_ms=1), length(step, "step", least_ms=1)
    )
    steps = [ForecastStep(iso(one.start_ms), iso(one.end_ms), one.count) for one in outlook]
    total = int(outlook.counts.sum())
    return ForecastAnswer(topic=name, total=total, overdue=outlook.overdue, exact=outlook.exact, steps=steps)


@get("/cluster", operation_id="cluster", summary="Show all brokers", responses=documented())
async def cluster(client: CallerClient) -> Response[ClusterAnswer]:
    """Return the status of each known broker: load, lateness, and connected consumers."""
    told = await client.timeline.standing()
    return Response(ClusterAnswer(list(told.brokers), dict(told.unreachable)))
