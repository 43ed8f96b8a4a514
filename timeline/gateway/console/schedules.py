"""Pages about recurring schedules: what there is, the coming week, and one of them with what may be done with it."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import islice, takewhile
from typing import Any

from litestar import Response, get, post

from timeline.driver.schedules import Schedule, schedule_page
from timeline.driver.times import as_datetime
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError
from timeline.gateway.console.messages import SHOWN_BYTES
from timeline.gateway.console.rendering import link
from timeline.gateway.console.visit import Fields, Visit, sentence, visiting
from timeline.gateway.problems import problem_of
from timeline.gateway.requests import ApiRequest
from timeline.gateway.routes.reading import read_cursor, shown_cursor
from timeline.gateway.routes.recurring import previewed
from timeline.gateway.shapes import PreviewRules
from timeline.gateway.values import CONTENT_TYPE, JSON, length

ROWS = 50
LOOKED_AT = 200
"""Schedules that are read at a time in the search of a name."""
STEP_MS = 200.0
WEEK_SCHEDULES = 50
"""Schedules whose times the calendar has."""
WEEK_TIMES = 1_000
"""Times of one schedule that the calendar counts, of a week."""
DAYS = 7
NEXT_SHOWN = 10
NAMES_SHOWN = 3


@get("/schedules", include_in_schema=False)
async def schedules(request: ApiRequest) -> Response[bytes]:
    """Show a page of schedules, the coming week, and a form that makes one."""
    async with visiting(request) as visit:
        topic, cursor, wanted = visit.query.exact("topic"), visit.query.text("cursor"), visit.query.text("q")
        found, after = await _named(visit, topic, wanted, cursor)
        following = link("/schedules", topic=topic, q=wanted, cursor=shown_cursor(after)) if after else ""
        names = [each.name for each in await visit.timeline.topics()]
        first = not cursor and not wanted
        values = {"topic": topic, "names": names, "following": following, "wanted": wanted, "first": first}
        return visit.page("schedules.html", schedules=found, given=visit.query, trouble="", **values)


async def _named(visit: Visit, topic: str, wanted: str, cursor: str) -> tuple[list[Schedule], bytes]:
    """Return a page of the schedules whose name contains a text, and where the next page begins. It has fewer than a
    page's, or none, if few of very many fit."""
    found, after = await _page(visit, topic, ROWS, cursor)
    if not wanted:
        return found, after
    matching = [one for one in found if wanted in one.name]
    end_ms = visit.gateway.clock.monotonic_ms() + STEP_MS
    while after and len(matching) < ROWS and visit.gateway.clock.monotonic_ms() < end_ms:
        found, after = await schedule_page(visit.timeline._context, topic or None, LOOKED_AT, after)
        matching += [one for one in found if wanted in one.name]
    return matching, after


async def _page(visit: Visit, topic: str, limit: int, cursor: str) -> tuple[list[Schedule], bytes]:
    await visit.request.begin_large()
    return await schedule_page(visit.timeline._context, topic or None, limit, read_cursor(cursor))


@get("/schedules/week", include_in_schema=False)
async def week(request: ApiRequest) -> Response[bytes]:
    """Show the coming week as a calendar, as a part of the page."""
    async with visiting(request) as visit:
        found, after = await _page(visit, visit.query.exact("topic"), WEEK_SCHEDULES, "")
        zone = visit.query.zone
        now = as_datetime(visit.gateway.clock.now_ms()).astimezone(zone)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        days = [midnight + timedelta(days=at) for at in range(DAYS)]
        end_ms = int((midnight + timedelta(days=DAYS)).timestamp() * 1000)
        times: dict[tuple[int, int], Counter[tuple[str, str]]] = {}
        cut = []
        for one in (each for each in found if each.status in ("active", "waiting")):
            ahead = await visit.gateway.walks.run(lambda one=one: _ahead(one, end_ms))  # type: ignore[misc]
            for at_ms in ahead:
                at = as_datetime(at_ms).astimezone(zone)
                day = (at.date() - midnight.date()).days
                if 0 <= day < DAYS:
                    times.setdefault((day, at.hour), Counter())[one.topic, one.name] += 1
            if len(ahead) >= WEEK_TIMES:
                cut.append(one.name)
        most = max((sum(cell.values()) for cell in times.values()), default=1)
        cells = {place: _cell(cell, most) for place, cell in times.items()}
        values = {"days": days, "cells": cells, "zone": str(zone), "cut": cut, "partly": bool(after), "now": now}
        return visit.page("_week.html", **values)


def _ahead(one: Schedule, end_ms: int) -> list[int]:
    """Return the times of a schedule until the end of the week, as many as the calendar counts."""
    coming = takewhile(lambda each: each.at_ms < end_ms, one.occurrences())
    return [each.at_ms for each in islice(coming, WEEK_TIMES)]


def _cell(cell: Counter[tuple[str, str]], most: int) -> dict[str, Any]:
    """Return what a cell of the calendar shows. `level`: 1 to 4, how much it is."""
    total = sum(cell.values())
    level = min(4, 1 + 4 * total // (most + 1))
    return {"total": total, "level": level, "shown": cell.most_common(NAMES_SHOWN), "more": len(cell) - NAMES_SHOWN}


@get("/schedule", include_in_schema=False)
async def schedule(request: ApiRequest) -> Response[bytes]:
    """Show a schedule, its next times and how far it has come."""
    async with visiting(request) as visit:
        one = await _standing(visit, visit.query)
        coming = await visit.gateway.walks.run(lambda: list(islice(one.occurrences(), NEXT_SHOWN)))
        payload = one.specification.payload[:SHOWN_BYTES].decode(errors="replace")
        return visit.page("schedule.html", one=one, says=one.specification, coming=coming, payload=payload)


async def _standing(visit: Visit, fields: Fields) -> Schedule:
    topic, name = fields.exact("topic"), fields.exact("name")
    await visit.request.begin_large()
    found = await visit.timeline.get_schedule(topic, name)
    if found is None:
        raise NotFound(f"there is no schedule {name!r:.120} on topic {topic!r:.120}")
    return found


@post("/schedule", include_in_schema=False)
async def act(request: ApiRequest) -> Response[bytes]:
    """Pause, resume, trigger or delete a schedule."""
    async with visiting(request) as visit:
        form = await visit.form()
        one, deed = await _standing(visit, visit.query), form.text("do")
        page, name = link("/schedule", topic=one.topic, name=one.name), one.name
        if deed == "pause":
            await one.pause()
            return visit.back(page, f"{name} is paused. Its occurrences that lay ahead were cancelled.")
        if deed == "resume":
            await one.resume()
            return visit.back(page, f"{name} goes on from now.")
        if deed == "trigger":
            receipt = await one.trigger()
            return visit.back(page, f"{receipt.id} was put on the timeline, due now.")
        if deed == "delete":
            await one.delete()
            return visit.back(link("/schedules", topic=one.topic), f"{name} was deleted.")
        raise Invalid(f"do is pause, resume, trigger or delete, not {deed!r:.40}")


@post("/schedules/preview", include_in_schema=False)
async def preview(request: ApiRequest) -> Response[bytes]:
    """Show the next times of the rules of the form, as a part of the page."""
    async with visiting(request) as visit:
        form = await visit.form()
        rules = PreviewRules(**_rules(form), limit=NEXT_SHOWN)
        told = await visit.gateway.walks.run(previewed(rules, visit.gateway.clock.now_ms()))
        return visit.page("_preview.html", told=told)


def _rules(form: Fields) -> dict[str, Any]:
    """Return the rules that the form has, as a body of the API has them."""
    given: dict[str, Any] = {name: form.text(name) for name in ("cron", "every", "rrule", "zone")}
    return {name: value for name, value in given.items() if value}


@post("/schedules/create", include_in_schema=False)
async def create(request: ApiRequest) -> Response[bytes]:
    """Create a schedule. A form with a mistake comes back as it was filled in."""
    async with visiting(request) as visit:
        form = await visit.form()
        try:
            given = _rules(form) | {"payload": form.raw("payload").encode(), "tag": form.text("tag") or None}
            if "every" in given:
                given["every"] = length(given["every"], "every", least_ms=1)
            if form.has("json"):
                given["headers"] = {CONTENT_TYPE: JSON}
            made = await visit.timeline.schedule(form.exact("topic"), form.text("name"), **given)
        except Forbidden:
            raise
        except TimelineError as wrong:
            found, after = await _page(visit, "", ROWS, "")
            following = link("/schedules", cursor=shown_cursor(after)) if after else ""
            names = [each.name for each in await visit.timeline.topics()]
            values: dict[str, Any] = {"topic": "", "names": names, "following": following, "first": True, "wanted": ""}
            values |= {"schedules": found, "given": form, "trouble": sentence(wrong)}
            return visit.page("schedules.html", status=problem_of(wrong).status, **values)
        return visit.back(link("/schedule", topic=made.topic, name=made.name), f"{made.name} is there.")
