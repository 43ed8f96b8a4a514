"""Messages: put, show, move and cancel."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Response, delete, get, patch, post

from timeline.driver.message import StoredMessage
from timeline.driver.times import iso_or_none
from timeline.errors import Forbidden, Invalid, NotFound
from timeline.gateway.clients import CallerClient
from timeline.gateway.keys import RepeatKey
from timeline.gateway.problems import documented
from timeline.gateway.putting import LINE, LineStream, PutRequest, answer_of_receipt, listed
from timeline.gateway.requests import AS_OPERATOR, MAX_BODY_BYTES, ApiRequest, Streamed
from timeline.gateway.service import serving
from timeline.gateway.shapes import MoveMessage, PutAnswer, PutAnswers, Stored
from timeline.gateway.values import (
    CONTENT_TYPE,
    JSON,
    ToPut,
    decoded,
    due_of,
    expiry,
    payload_fields,
    text_of,
)
from timeline.model import DEFAULT_GROUP, Status

ENCODER = msgspec.json.Encoder()
JSON_LINES = "application/x-ndjson"
GONE = (
    "no message has this id. If this repeats a call whose answer was lost, that call cancelled it, or it was delivered "
    "first"
)
OURS = "timeline-"
RAW = {name: f"{OURS}{name}" for name in ("at", "in", "id", "tag", "expires", "group", "if-exists")}
"""Headers that describe a message whose payload is the body: `Timeline-At`, `Timeline-In`, …"""


@post(
    "/topics/{topic:str}/messages",
    operation_id="putMessages",
    summary="Put one message, an array of them, or a stream",
    status_code=201,
    responses=documented(Status.NOT_FOUND, Status.EXISTS, Status.LEASED, Status.DEAD, Status.TOO_LARGE),
)
async def put(request: ApiRequest, client: CallerClient, topic: str) -> Any:
    """Put messages on the topic's timeline. One message answers 201, or 200 if it is there already. An array and a
    stream (`application/x-ndjson`) answer 207, with a status for each message. `Idempotency-Key`: a repeat of the same
    request puts nothing twice, and gets the same answer."""
    name = text_of(topic)
    key = RepeatKey(request.key, name)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    puts = PutRequest(client, name, key, request.trace)
    described = [header for header in request.headers if header.startswith(OURS) and header != AS_OPERATOR]
    if unknown := next((header for header in described if header not in RAW.values()), ""):
        known = ", ".join(header.title() for header in RAW.values())
        raise Invalid(f"there is no header {unknown.title()!r:.80}: this call takes {known}")
    if described and kind == JSON_LINES:
        raise Invalid(f"each line says when it is due: write in or at into it, and leave out {described[0].title()}")
    if described:
        return _answered(*await puts.one(raw_message(request, await request.body(MAX_BODY_BYTES, 1), key)))
    if kind == JSON_LINES:
        lines = LineStream(request, puts)
        if JSON_LINES in request.headers.get("accept", ""):
            return Streamed(_encoded(request, lines), 207, JSON_LINES)
        return Response(await lines.summary(), status_code=207)
    if kind not in ("", JSON):
        raise Invalid(
            f"a body of type {kind!r:.80} is the payload itself: say when it is due in the header Timeline-In or "
            "Timeline-At. A message in JSON has the type application/json"
        )
    body = await request.body(MAX_BODY_BYTES, 1)
    if body.lstrip()[:1] == b"[":
        return Response(PutAnswers(await puts.many(listed(body))), status_code=207)
    return _answered(*await puts.one(puts.to_put(decoded(LINE, body))))


async def _encoded(request: ApiRequest, lines: LineStream) -> AsyncGenerator[bytes, None]:
    async with serving(request):  # the call's own loan ends before its answer
        async for answers in lines.answers():
            yield ENCODER.encode_lines(answers)
    if lines.stopped is not None:
        yield ENCODER.encode_lines([lines.stopped])


def raw_message(request: ApiRequest, body: bytes, key: RepeatKey) -> ToPut:
    """Return the message whose payload is the whole body. Raise Invalid for headers that do not go together, or that
    come twice."""
    given = {name: _text(name, request.sole(header)) for name, header in RAW.items()}
    if given["at"] is None and given["in"] is None:
        raise Invalid("a body with headers Timeline-… is a payload: say when it is due, in Timeline-In or Timeline-At")
    when = due_of(given["at"], given["in"])
    expires = given["expires"]
    kind = request.headers.get("content-type")
    headers = {**({} if given["id"] else request.trace), **({CONTENT_TYPE: kind} if kind else {})}
    fields = {
        "payload": body,
        "id": given["id"] or key.id(0),
        "tag": given["tag"],
        "headers": headers or None,
        "expires": None if expires is None else expiry(expires),
        **when,
    }
    return ToPut(fields, given["group"] or DEFAULT_GROUP, given["if-exists"])


def _text(name: str, value: str | None) -> str | None:
    """Return a header's value, which is UTF-8. Raise Invalid for other bytes."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise Invalid(f"Timeline-{name.title()} must be UTF-8") from None


def _answered(answer: PutAnswer, created: bool) -> Response[Any]:
    return Response(answer, status_code=201 if created else 200)


@get(
    "/topics/{topic:str}/messages/{id:str}",
    operation_id="showMessage",
    summary="Show one message",
    responses=documented(Status.NOT_FOUND),
)
async def show(request: ApiRequest, client: CallerClient, topic: str, id: str) -> Stored:
    """Return a message with its state, its headers and its payload."""
    name, named = text_of(topic), text_of(id)
    await request.begin_large()
    try:
        entry = await client.timeline.get(name, named)
    except Forbidden as denied:
        denied.reason += ". GET …/messages/{id}/why shows it without its payload"
        raise
    if entry is None:
        raise NotFound(id=named)
    return stored(entry)


def stored(entry: StoredMessage) -> Stored:
    """Return a stored message for an answer."""
    payload = {} if entry.payload is None else payload_fields(entry.payload, entry.headers)
    return Stored(
        id=entry.id,
        state=str(entry.state),
        due=iso_or_none(entry.due_ms),
        scheduled=iso_or_none(entry.scheduled_ms),
        version=entry.version,
        deliveries=entry.deliveries,
        group=entry.group,
        holder=entry.holder,
        tag=entry.tag,
        expires=iso_or_none(entry.expires_ms),
        died=iso_or_none(entry.died_ms),
        reason=entry.dead,
        headers=entry.headers,
        **payload,
    )


@patch(
    "/topics/{topic:str}/messages/{id:str}",
    operation_id="moveMessage",
    summary="Move one message",
    responses=documented(Status.NOT_FOUND, Status.LEASED, Status.DEAD, Status.FENCED, Status.EXPIRED),
)
async def move(request: ApiRequest, client: CallerClient, topic: str, id: str, data: MoveMessage) -> PutAnswer:
    """Move a message to another due time. `Idempotency-Key`: a repeat of the same request moves nothing again, and gets
    the same answer."""
    when = due_of(data.at, data.in_)
    name, named = text_of(topic), text_of(id)
    op = RepeatKey(request.key, name).operation("move", named, data)
    async with client.producer(name, data.group) as producer:
        return answer_of_receipt(await producer.move(named, if_version=data.if_version, operation_id=op, **when))


@delete(
    "/topics/{topic:str}/messages/{id:str}",
    operation_id="cancelMessage",
    summary="Cancel one message",
    status_code=200,
    responses=documented(Status.NOT_FOUND, Status.LEASED, Status.DEAD, Status.FENCED, Status.EXPIRED),
)
async def cancel(
    request: ApiRequest,
    client: CallerClient,
    topic: str,
    id: str,
    group: str = DEFAULT_GROUP,
    leased: bool = False,
    if_version: int | None = None,
) -> PutAnswer:
    """Delete a message that is not leased. `leased=true`: one that a consumer has, too. `Idempotency-Key`: a repeat of
    the same request gets the same answer while the topic remembers the id (`remember`). After that it answers 404."""
    name, named = text_of(topic), text_of(id)
    key = RepeatKey(request.key, name)
    op = key.operation("cancel", named, group, leased, if_version)
    async with client.producer(name, group) as producer:
        try:
            told = await producer.cancel(named, leased=leased, if_version=if_version, operation_id=op)
        except NotFound as gone:
            if key and not gone.reason:
                raise NotFound(GONE, id=gone.id) from gone
            raise
    answer = answer_of_receipt(told)
    answer.settled = False  # as a repeat has it, by which alone it would differ
    return answer
