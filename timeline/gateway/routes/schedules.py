"""Recurring schedules: create, list, show, change, pause, trigger, backfill and delete them. Show what rules give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from litestar import Response, delete, get, patch, post, put
from litestar.params import Parameter

from timeline.driver.schedules import Schedule, schedule_page, specification_fields
from timeline.errors import Fenced, Invalid, NotFound, Unavailable
from timeline.gateway.clients import CallerClient
from timeline.gateway.problems import documented
from timeline.gateway.putting import answer_of_receipt
from timeline.gateway.requests import ApiRequest, while_connected
from timeline.gateway.routes.many import DryRun
from timeline.gateway.routes.reading import PAGE_BYTES, Cursor, Limit, read_cursor, shown_cursor
from timeline.gateway.routes.recurring import (
    changed_headers,
    previewed,
    schedule_fields,
    stored_schedule,
    upcoming,
    whole,
)
from timeline.gateway.service import gateway_of
from timeline.gateway.shapes import (
    BackfillAnswer,
    BackfillRange,
    ChangeSchedule,
    NewSchedule,
    NextTimes,
    Pending,
    PreviewAnswer,
    PreviewRules,
    PutAnswer,
    ReplaceSchedule,
    StoredSchedule,
    StoredSchedules,
    TriggerTime,
)
from timeline.gateway.values import instant, text_of
from timeline.model import Status, check_topic_name
from timeline.wording import no_such_topic

T = TypeVar("T")
ALL, ONE = "/topics/{topic:str}/schedules", "/topics/{topic:str}/schedules/{name:str}"
IfRevision = Annotated[int, Parameter(ge=0, description="Only if the schedule has this revision. 0: any.")]
ANY = 0
PendingNow = Annotated[
    Pending,
    Parameter(description="Occurrences that lie ahead on the timeline: cancelled, or kept. Default: cancel."),
]
TRIES = 5
AT_ONCE = 50
"""Schedules that are read at a time. Reading rules takes a while, and other calls go on in between."""
SEE_ALL = "GET /v1/topics/{topic}/schedules lists those that there are"
WithPayload = Annotated[bool, Parameter(description="With payloads.")]


@post(
    ALL,
    operation_id="createSchedule",
    summary="Create a recurring schedule",
    status_code=201,
    responses=documented(Status.NOT_FOUND, Status.EXISTS, Status.TOO_LARGE),
)
async def create(request: ApiRequest, client: CallerClient, topic: str, data: NewSchedule) -> Response[StoredSchedule]:
    """Create a schedule: 201. One that is the same and is there already answers 200, another one of that name 409.
    So it needs no `Idempotency-Key`."""
    await request.begin_large()
    return await _created(client, text_of(topic), data.name, schedule_fields(data))


async def _created(client: CallerClient, topic: str, name: str, fields: dict[str, Any]) -> Response[StoredSchedule]:
    stood = await client.timeline.get_schedule(topic, name)
    given = {field: value for field, value in fields.items() if value is not None}
    made = await client.timeline.schedule(topic, name, **given)
    return Response(stored_schedule(made), status_code=201 if stood is None else 200)


@get(ALL, operation_id="listSchedules", summary="List the schedules of a topic", responses=documented(Status.NOT_FOUND))
async def list_(
    request: ApiRequest, client: CallerClient, topic: str, payload: WithPayload = False, limit: Limit = 100,
    cursor: Cursor = None,
) -> StoredSchedules:  # fmt: skip
    """Return a page of schedules, in no order. With large payloads, a page has fewer than `limit`. Only a null cursor
    is the end."""
    name = check_topic_name(text_of(topic))
    page = await _page(request, client, name, payload, limit, cursor)
    if not page.schedules and name not in {each.name for each in await client.timeline.topics()}:
        raise NotFound(no_such_topic(name))
    return page


@get("/schedules", operation_id="listAllSchedules", summary="List all schedules", responses=documented())
async def list_all(
    request: ApiRequest, client: CallerClient, payload: WithPayload = False, limit: Limit = 100, cursor: Cursor = None
) -> StoredSchedules:
    """Return a page of the schedules of all topics that the token may see, in no order. Only a null cursor is the
    end."""
    return await _page(request, client, None, payload, limit, cursor)


async def _page(
    request: ApiRequest, client: CallerClient, topic: str | None, payload: bool, limit: int, cursor: str | None
) -> StoredSchedules:
    found: list[StoredSchedule] = []
    after, left_bytes = read_cursor(cursor), PAGE_BYTES
    await request.begin_large()
    while True:
        count = min(AT_ONCE, limit - len(found))
        some, after = await schedule_page(client.timeline._context, topic, count, after)
        found += [stored_schedule(one, payload) for one in some]
        left_bytes -= sum(len(one.specification.payload) for one in some) if payload else 0
        if not after or len(found) >= limit or left_bytes <= 0:
            return StoredSchedules(found, shown_cursor(after))


@get(ONE, operation_id="showSchedule", summary="Show a schedule", responses=documented(Status.NOT_FOUND))
async def show(request: ApiRequest, client: CallerClient, topic: str, name: str) -> StoredSchedule:
    """Return a schedule with its state."""
    await request.begin_large()
    return stored_schedule(await _standing(client, topic, name))


async def _standing(client: CallerClient, topic: str, name: str) -> Schedule:
    topic, name = text_of(topic), text_of(name)
    found = await client.timeline.get_schedule(topic, name)
    if found is None:
        raise NotFound(f"there is no schedule {name!r:.120} on topic {topic!r:.120}", advice=SEE_ALL)
    return found


@put(
    ONE,
    operation_id="replaceSchedule",
    summary="Create a schedule, or replace it as a whole",
    status_code=200,
    responses=documented(Status.NOT_FOUND, Status.EXISTS, Status.FENCED, Status.TOO_LARGE),
)
async def replace(
    request: ApiRequest, client: CallerClient, topic: str, name: str, data: ReplaceSchedule,
    pending: PendingNow = "cancel", if_revision: IfRevision = ANY,
) -> Response[StoredSchedule]:  # fmt: skip
    """Make the schedule what the body says: 201 if it was created. Fields that are left out have their defaults. It
    needs no `Idempotency-Key`: a repeat changes nothing, and gets the same schedule."""
    fields = schedule_fields(data)
    await request.begin_large()
    if not if_revision and await client.timeline.get_schedule(text_of(topic), text_of(name)) is None:
        return await _created(client, text_of(topic), text_of(name), fields)
    standing = await _standing(client, topic, name)
    return Response(stored_schedule(await _changed(standing, whole(fields), pending, if_revision)))


@patch(
    ONE,
    operation_id="updateSchedule",
    summary="Change a schedule",
    responses=documented(Status.NOT_FOUND, Status.FENCED, Status.TOO_LARGE),
)
async def update(
    request: ApiRequest, client: CallerClient, topic: str, name: str, data: ChangeSchedule,
    pending: PendingNow = "cancel", if_revision: IfRevision = ANY,
) -> StoredSchedule:  # fmt: skip
    """Change the fields that the body has. Null sets a field to its default. It needs no `Idempotency-Key`: a repeat
    changes nothing, and gets the same schedule."""
    fields = schedule_fields(data)
    await request.begin_large()
    for left in reversed(range(TRIES)):
        standing = await _standing(client, topic, name)
        if "payload" not in fields and "headers" not in fields:
            return stored_schedule(await _changed(standing, fields, pending, if_revision))
        # Headers go with the payload, so those that stand must not change meanwhile.
        fields["headers"] = changed_headers(data, standing.specification.headers)
        try:
            return stored_schedule(await _changed(standing, fields, pending, if_revision or standing.revision))
        except Fenced:
            if if_revision or not left:
                raise
    raise AssertionError


async def _changed(standing: Schedule, fields: dict[str, Any], pending: str, if_revision: int) -> Schedule:
    """Return the schedule after a change. Raise Fenced if it stands at another revision, unless that is the one which
    this very change has made: then the call is a repeat."""
    try:
        return await standing.update(**fields, pending=pending, if_revision=if_revision or None)
    except Fenced:
        says = (await standing.refresh()).specification
        if standing.revision != if_revision + 1 or says.changed(**specification_fields(fields)) != says:
            raise
        return standing


@delete(
    ONE,
    operation_id="deleteSchedule",
    summary="Delete a schedule",
    status_code=204,
    responses=documented(Status.NOT_FOUND),
)
async def drop(client: CallerClient, topic: str, name: str, pending: PendingNow = "cancel") -> None:
    """Delete a schedule. It needs no `Idempotency-Key`: a repeat answers 404."""
    await (await _standing(client, topic, name)).delete(pending=pending)


@post(
    f"{ONE}/:pause",
    operation_id="pauseSchedule",
    summary="Pause a schedule",
    status_code=200,
    responses=documented(Status.NOT_FOUND),
)
async def pause(
    request: ApiRequest, client: CallerClient, topic: str, name: str, pending: PendingNow = "cancel"
) -> StoredSchedule:
    """Produce nothing until it is resumed. It needs no `Idempotency-Key`: a repeat changes nothing."""
    await request.begin_large()
    return stored_schedule(await (await _standing(client, topic, name)).pause(pending=pending))


@post(
    f"{ONE}/:resume",
    operation_id="resumeSchedule",
    summary="Resume a schedule",
    status_code=200,
    responses=documented(Status.NOT_FOUND),
)
async def resume(request: ApiRequest, client: CallerClient, topic: str, name: str) -> StoredSchedule:
    """Go on from now. Times that lay in the pause are not caught up. It needs no `Idempotency-Key`: a repeat changes
    nothing."""
    await request.begin_large()
    return stored_schedule(await (await _standing(client, topic, name)).resume())


@post(
    f"{ONE}/:trigger",
    operation_id="triggerSchedule",
    summary="Produce an occurrence now",
    status_code=201,
    responses=documented(Status.NOT_FOUND, Status.TOO_LARGE),
)
async def trigger(client: CallerClient, topic: str, name: str, data: TriggerTime | None = None) -> PutAnswer:
    """Put the schedule's message at once, beside its occurrences. It needs no `Idempotency-Key`: a repeat with the same
    `at` puts nothing more. Without `at`, each call puts a message."""
    at_ms = None if data is None or data.at is None else instant(data.at, "at")
    standing = await _standing(client, topic, name)
    return answer_of_receipt(await standing.trigger(at=at_ms))


@post(
    f"{ONE}/:backfill",
    operation_id="backfillSchedule",
    summary="Produce the occurrences of a range of the past",
    status_code=200,
    responses=documented(Status.NOT_FOUND),
)
async def backfill(
    client: CallerClient, topic: str, name: str, data: BackfillRange, dry_run: DryRun = False
) -> BackfillAnswer:
    """Put each occurrence of the range that was not produced, at most 10,000. They are due at once. It needs no
    `Idempotency-Key`: a repeat produces nothing twice while the topic remembers (`remember`)."""
    start, end = instant(data.from_, "from"), instant(data.to, "to")
    if end <= start:
        raise Invalid("to must be after from")
    told = await (await _standing(client, topic, name)).backfill(start, end, dry_run=dry_run)
    return BackfillAnswer(produced=told.produced, present=told.present, failed=told.failed, dry_run=dry_run)


@get(
    f"{ONE}/next",
    operation_id="nextOccurrences",
    summary="Show the next times of a schedule",
    responses=documented(Status.NOT_FOUND),
)
async def next_(request: ApiRequest, client: CallerClient, topic: str, name: str, limit: Limit = 10) -> NextTimes:
    """Return the next times. Those of a paused schedule are those that it would have if it were resumed now."""
    return await _walked(request, upcoming(await _standing(client, topic, name), limit))


@post(
    "/schedules:preview",
    operation_id="previewSchedule",
    summary="Show the times that rules give",
    status_code=200,
    responses=documented(),
)
async def preview(request: ApiRequest, client: CallerClient, data: PreviewRules) -> PreviewAnswer:
    """Return the next times of cron expressions, of a period, or of rules of RFC 5545. Nothing is scheduled. It needs
    no `Idempotency-Key`: it changes nothing."""
    return await _walked(request, previewed(data, gateway_of(request).clock.now_ms()))


async def _walked(request: ApiRequest, walk: Callable[[], T]) -> T:
    """Return what a walk along rules answers. Other calls go on meanwhile."""
    gateway = gateway_of(request)
    told = await while_connected(request, gateway.walks.run(walk), gateway.ending)
    if told is None:
        raise Unavailable("the gateway is about to end")
    return told
