"""Pages about one topic: its load and settings, its messages, and a form that puts a message."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from functools import partial
from typing import Any

from litestar import Response, get, post

from timeline.driver.queries import DURATIONS, PERCENTS, STATES
from timeline.errors import Forbidden, Invalid, Throttled, TimelineError, Unavailable, Unknown
from timeline.gateway.console.live import look_of
from timeline.gateway.console.overview import WINDOWS
from timeline.gateway.console.rendering import link
from timeline.gateway.console.search import begins_with, search
from timeline.gateway.console.visit import Fields, Visit, sentence, visiting
from timeline.gateway.keys import RepeatKey
from timeline.gateway.problems import problem_of
from timeline.gateway.requests import ApiRequest
from timeline.gateway.values import CONTENT_TYPE, JSON, expiry, length
from timeline.model import DEFAULT_GROUP, Status, Topic, TopicSettings
from timeline.wording import typed_name, typed_value

FIXED = ("buckets", "kind")
PRODUCED = ("id", "tag", "headers", "json", "expires", "in", "at", "zone")
"""Fields of the form that produces, beside topic, group and payload."""
GROUPS = {
    "Delivery": ("paused", "max_rate_per_s", "lease", "max_lease", "lease_ahead", "max_deliveries"),
    "Retry": ("redelivery_backoff", "retry_first", "retry_factor", "retry_cap", "retry_jitter"),
    "Webhook": ("push_url", "push_timeout", "push_concurrency", "push_rate"),
    "Storage": ("horizon", "remember", "dead_retention", "max_payload_bytes", "buckets", "kind"),
}
"""Settings, as they are typed, in the order of the form."""


@get("/topic", include_in_schema=False)
async def topic(request: ApiRequest) -> Response[bytes]:
    """Show a topic: its load, its messages, its consumers and its settings."""
    async with visiting(request) as visit:
        return await _page(visit, await visit.topic(visit.query.exact("name")))


async def _page(
    visit: Visit, record: Topic, given: Fields | None = None, wrong: TimelineError | None = None
) -> Response[bytes]:
    """Return a topic's page. `given`: settings that were sent and not taken, `wrong`: why."""
    look, standings = await asyncio.gather(look_of(visit.client), visit.timeline.standing(record.name))
    settings = {
        group: [(name, _typed(given, name, value), default, value) for name, value, default in rows]
        for group, rows in _settings(record.settings).items()
    }
    return visit.page(
        "topic.html",
        status=200 if wrong is None else problem_of(wrong).status,
        record=record,
        load=next((one for one in look.seen.topics if one.name == record.name), None),
        consumers=[one for broker in standings.brokers for one in broker.consumers],
        windows=WINDOWS,
        states=STATES,
        filters=_filters(visit.query),
        group=DEFAULT_GROUP,
        settings=settings,
        fixed=FIXED,
        trouble="" if wrong is None else sentence(wrong),
    )


def _typed(given: Fields | None, name: str, value: str) -> str:
    """Return what a form that was refused says of a setting, else `value`, which it is."""
    if given is None:
        return value
    if name == "paused":
        return str(given.has(name))
    return given.text(name) if given.has(name) else value


def _settings(settings: TopicSettings) -> dict[str, list[tuple[str, str, str]]]:
    """Return the settings by group: the name, the value and the default, as they are typed."""
    default = TopicSettings()
    by_name = {typed_name(one.name): one.name for one in dataclasses.fields(settings)}

    def typed(of: TopicSettings, name: str) -> str:
        return typed_value(by_name[name], getattr(of, by_name[name]))

    return {
        group: [(name, typed(settings, name), typed(default, name)) for name in names]
        for group, names in GROUPS.items()
    }


def _filters(query: Fields) -> dict[str, Any]:
    """Return the filters of a list of messages, as its form has them."""
    given = {name: query.exact(name) for name in ("tag", "prefix")}
    given |= {name: query.text(name) for name in ("due_from", "due_to", "zone")}
    return given | {"states": [one for one in query.texts("state") if one in STATES]}


@get("/messages", include_in_schema=False)
async def messages(request: ApiRequest) -> Response[bytes]:
    """Show some messages of a topic, as a part of its page."""
    async with visiting(request) as visit:
        query, name = visit.query, visit.query.exact("topic")
        filters = _filters(query)
        due = query.instant_ms("due_from"), query.instant_ms("due_to")
        prefix = filters["prefix"].encode()
        scan = partial(
            visit.timeline.scan_pages,
            name,
            state=filters["states"] or STATES,
            tag=filters["tag"] or None,
            due=None if due == (None, None) else due,
        )
        fields = filters | {"topic": name, "state": filters.pop("states")}
        chosen = (lambda rows: begins_with(rows, prefix)) if prefix else None
        found = await search(visit, "/messages", fields, lambda limit, cursor: scan(limit=limit, cursor=cursor), chosen)
        return visit.page("_messages.html", topic=name, found=found)


@post("/topic/create", include_in_schema=False)
async def create(request: ApiRequest) -> Response[bytes]:
    """Create a topic."""
    async with visiting(request) as visit:
        name = (await visit.form()).text("name")
        made = await visit.timeline.create_topic(name)
        return visit.back(link("/topic", name=made.name), f"Topic {made.name} is there.")


@post("/topic/settings", include_in_schema=False)
async def settings(request: ApiRequest) -> Response[bytes]:
    """Change settings of a topic: those that differ from what the form was made with."""
    async with visiting(request) as visit:
        form = await visit.form()
        name = visit.query.exact("topic")
        try:
            changed = _changed(form)
            if not changed:
                return visit.back(link("/topic", name=name), "Nothing was changed.")
            await visit.timeline.update_topic(name, **changed)
        except (Invalid, Throttled, Unavailable, Unknown) as wrong:
            return await _page(visit, await visit.topic(name), form, wrong)
        return visit.back(link("/topic", name=name), f"Changed: {', '.join(sorted(changed))}.")


def _changed(form: Fields) -> dict[str, Any]:
    """Return the settings that the form changes, as the driver takes them. Raise Invalid."""
    found: dict[str, Any] = {}
    for name in (name for names in GROUPS.values() for name in names if name not in FIXED):
        said, before = form.text(name), form.text(f"was_{name}")
        if name == "paused":
            said = str(form.has(name))
        if said != before:
            found[name] = _setting(name, said)
    return found


def _setting(name: str, said: str) -> Any:
    if name == "paused":
        return said == "True"
    if name == "push_url":
        return said
    if name in DURATIONS:
        return said if said == "auto" else length(said, name)
    try:
        return float(said) if name in PERCENTS else int(said)
    except ValueError:
        raise Invalid(f"{name} must be a number, not {said!r:.60}") from None


@post("/topic/pause", include_in_schema=False)
async def pause(request: ApiRequest) -> Response[bytes]:
    """Pause a topic, or resume it."""
    async with visiting(request) as visit:
        form = await visit.form()
        name, deed = visit.query.exact("topic"), form.text("do")
        if deed not in ("pause", "resume"):
            raise Invalid(f"do is pause or resume, not {deed!r:.40}")
        stop = deed == "pause"
        await visit.timeline.update_topic(name, paused=stop)
        said = f"{name} is paused: nothing is delivered." if stop else f"{name} delivers again."
        return visit.back(link("/topic", name=name), said)


@get("/produce", include_in_schema=False)
async def produce_form(request: ApiRequest) -> Response[bytes]:
    """Show a form that puts a message."""
    async with visiting(request) as visit:
        names = [each.name for each in await visit.timeline.topics()]
        return visit.page("produce.html", names=names, given=visit.query, drawn=secrets.token_hex(8), trouble="")


@post("/produce", include_in_schema=False)
async def produce(request: ApiRequest) -> Response[bytes]:
    """Put a message. A form with a mistake comes back as it was filled in."""
    async with visiting(request) as visit:
        form = await visit.form()
        try:
            return await _produced(visit, form)
        except Forbidden:
            raise
        except TimelineError as wrong:
            names = await _names(visit, form.exact("topic"))
            status = problem_of(wrong).status
            values = {"names": names, "given": form, "drawn": form.text("drawn"), "trouble": sentence(wrong)}
            return visit.page("produce.html", status=status, **values)


async def _names(visit: Visit, chosen: str) -> list[str]:
    """Return the names of all topics, or while no broker answers the one that was chosen."""
    try:
        return [each.name for each in await visit.timeline.topics()]
    except (Unavailable, Throttled):
        return [chosen]


async def _produced(visit: Visit, form: Fields) -> Response[bytes]:
    name, headers = form.exact("topic"), _headers(form.raw("headers"))
    if form.has("json"):
        headers.setdefault(CONTENT_TYPE, JSON)
    asked = {
        "id": form.text("id") or form.text("drawn") or None,
        "tag": form.text("tag") or None,
        "headers": headers or None,
        "expires": expiry(form.text("expires")) if form.text("expires") else None,
        **(form.due() if form.text("in") or form.text("at") else {"in_": 0}),
    }
    payload, group = form.raw("payload").encode(), form.text("group") or DEFAULT_GROUP
    # The form twice puts one message. What was changed before it was sent again is another one.
    drawn, fields = form.text("drawn"), [form.raw(field) for field in PRODUCED]
    birth = RepeatKey(drawn, name).birth(0, payload, group, *fields) if drawn else None
    async with visit.client.producer(name, group) as producer:
        receipt = await producer.produce(payload, birth=birth, **asked)
    said = f"{receipt.id} is on the timeline of {name}."
    if receipt.settled:
        said = f"{receipt.id} was produced before and is settled. Nothing was put on the timeline."
    elif receipt.status == Status.DUPLICATE:
        said = f"{receipt.id} was on the timeline of {name} already, with the same payload. It stays as it is."
    return visit.back(link("/message", topic=name, id=receipt.id), said)


def _headers(text: str) -> dict[str, str]:
    """Return headers that are written a line each: `name: value`. Raise Invalid."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.split("\n"))):
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise Invalid(f"write each header on a line of its own, name: value, not {line!r:.80}")
        found[name.strip()] = value.strip()
    return found
