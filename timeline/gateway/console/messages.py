"""Pages about one message: what it is, why it is late or what it waits for, and what may be done with it."""

from __future__ import annotations

import re
from datetime import UTC
from typing import Any

import msgspec
from litestar import Response, get, post

from timeline.driver.late import Why
from timeline.driver.message import StoredMessage
from timeline.driver.receipts import Receipts
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError
from timeline.gateway.clients import UNAUTHENTICATED
from timeline.gateway.console.rendering import link
from timeline.gateway.console.visit import Fields, Visit, sentence, visiting
from timeline.gateway.problems import problem_of
from timeline.gateway.requests import ApiRequest
from timeline.gateway.values import is_json
from timeline.model import DEFAULT_GROUP

SHOWN_BYTES = 64 * 1024
"""A payload's bytes on the page. The rest is in the download."""
HEX_BYTES = 4 * 1024
PER_LINE = 16
DEEPEST = 50
"""Levels of JSON that are shown with indents."""
BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]')
PATH = ("waiting", "available", "leased")
"""The states of a message in the order in which it passes them."""


@get("/message", include_in_schema=False)
async def message(request: ApiRequest) -> Response[bytes]:
    """Show a message with its payload, and explain where it is."""
    async with visiting(request) as visit:
        return await _page(visit, visit.query.exact("topic"), visit.query.exact("id"))


async def _page(
    visit: Visit, topic: str, id: str, given: Fields | None = None, wrong: TimelineError | None = None
) -> Response[bytes]:
    """Return a message's page. `given`: a form that was sent and refused, `wrong`: why."""
    await visit.request.begin_large()
    stored, hidden = await _stored(visit, topic, id)
    told, absent = await _why(visit, topic, id)
    problem = None if wrong is None else problem_of(wrong)
    return visit.page(
        "message.html",
        status=200 if problem is None else problem.status,
        problem=problem,
        trouble="" if wrong is None else sentence(wrong),
        given=given or Fields({}),
        topic=topic,
        id=id,
        message=stored,
        hidden=hidden,
        why=told,
        absent=absent,
        origin=None if told is None else told.schedule,
        said=[] if told is None or told.schedule is None else told.schedule.lines(told.message, UTC),
        course=PATH,
        payload=None if stored is None or stored.payload is None else _payload(stored),
    )


async def _stored(visit: Visit, topic: str, id: str) -> tuple[StoredMessage | None, str]:
    """Return a message, with its payload if the token may read it, and else why it may not."""
    try:
        return await visit.timeline.get(topic, id), ""
    except Forbidden as denied:
        return await visit.timeline.get(topic, id, payload=False), sentence(denied)


async def _why(visit: Visit, topic: str, id: str) -> tuple[Why | None, str]:
    """Return what is known about where a message is, or the sentence that nothing is."""
    try:
        return await visit.timeline.why(topic, id), ""
    except NotFound as absent:
        return None, sentence(absent)


def _payload(message: StoredMessage) -> dict[str, Any]:
    """Return a payload as text, as JSON and as bytes. Each is cut, and None where it cannot be."""
    held = message.payload or b""
    try:
        held.decode()
        text: str | None = held[:SHOWN_BYTES].decode(errors="ignore")  # the cut may part a character
    except UnicodeDecodeError:
        text = None
    pretty = None
    if text and len(held) <= SHOWN_BYTES and (is_json(message.headers) or text[:1] in "{[") and _is_flat(text):
        try:
            pretty = msgspec.json.format(held, indent=2).decode()
        except msgspec.DecodeError:
            pretty = None  # its header, or its first letter, is not true
    return {
        "bytes": len(held),
        "text": text,
        "json": pretty,
        "hex": _hex(held[:HEX_BYTES]),
        "cut": len(held) > SHOWN_BYTES,
        "hex_cut": len(held) > HEX_BYTES,
    }


def _is_flat(text: str) -> bool:
    """Return whether JSON is nested as people write it. Deeper, its indents would be very many times as long as it."""
    depth = deepest = 0
    for found in BRACKET.findall(text):  # brackets, and strings, which may hold some
        depth += (found in "[{") - (found in "]}")
        deepest = max(deepest, depth)
    return deepest <= DEEPEST


def _hex(held: bytes) -> str:
    """Return bytes in hexadecimal digits and as text, a line for each sixteen."""
    lines = []
    for at in range(0, len(held), PER_LINE):
        some = held[at : at + PER_LINE]
        shown = "".join(chr(one) if 32 <= one < 127 else "·" for one in some)
        lines.append(f"{at:08x}  {some.hex(' '):<{PER_LINE * 3 - 1}}  {shown}")
    return "\n".join(lines)


@get("/message/payload", include_in_schema=False)
async def payload(request: ApiRequest) -> Response[bytes]:
    """Return the payload as a file to keep: browsers show none of it."""
    async with visiting(request) as visit:
        await request.begin_large()
        stored = await visit.timeline.get(visit.query.exact("topic"), visit.query.exact("id"))
        if stored is None:
            raise NotFound(id=visit.query.exact("id"))
        headers = {
            "Content-Disposition": 'attachment; filename="payload.bin"',
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        return Response(stored.payload or b"", media_type="application/octet-stream", headers=headers)


@post("/message", include_in_schema=False)
async def act(request: ApiRequest) -> Response[bytes]:
    """Move a message, deliver it now, cancel it, or revive or purge it if it is a dead letter."""
    async with visiting(request) as visit:
        form = await visit.form()
        topic, id, deed = visit.query.exact("topic"), visit.query.exact("id"), form.text("do")
        page = link("/message", topic=topic, id=id)
        try:
            said = await _done(visit, form, topic, id, deed)
        except TimelineError as wrong:
            if isinstance(wrong, Forbidden) and UNAUTHENTICATED in wrong.found:
                raise
            return await _page(visit, topic, id, form, wrong)
        gone = deed in ("cancel", "purge")
        return visit.back(link("/topic", name=topic) if gone else page, said)


async def _done(visit: Visit, form: Fields, topic: str, id: str, deed: str) -> str:
    """Do what the form asks, and say what was done. Raise TimelineError."""
    version = form.number("version") or None
    async with visit.client.producer(topic, form.exact("group") or DEFAULT_GROUP) as producer:
        if deed == "move":
            await producer.move(id, if_version=version, **form.due())
            return f"{id} was moved."
        if deed == "now":
            await producer.move(id, in_=0, if_version=version)
            return f"{id} is due now."
        if deed == "cancel":
            await producer.cancel(id, leased=form.has("leased"), if_version=version)
            return f"{id} was cancelled."
        if deed == "revive":
            when = form.due() if form.text("at") or form.text("in") else {"in_": 0}
            _check(await producer.revive([id], **when))
            return f"{id} is back on the timeline."
        if deed == "purge":
            _check(await producer.purge([id]))
            return f"{id} was deleted for good."
    raise Invalid(f"do is move, now, cancel, revive or purge, not {deed!r:.40}")


def _check(receipts: Receipts) -> None:
    receipts.raise_failed()
