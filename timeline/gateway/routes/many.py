"""Changes of many messages: by tag, and dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from litestar import delete, patch, post
from litestar.params import Parameter

from timeline.driver.mutations import TagProgress
from timeline.driver.receipts import Receipts
from timeline.driver.times import shift_ms
from timeline.errors import Invalid, TimelineError
from timeline.gateway.clients import CallerClient
from timeline.gateway.keys import RepeatKey
from timeline.gateway.problems import documented, sentence
from timeline.gateway.putting import FAILED_SHOWN, answer_of_receipt
from timeline.gateway.requests import ApiRequest
from timeline.gateway.shapes import DeadLetters, LettersAnswer, MoveTag, ReviveLetters, TagAnswer
from timeline.gateway.values import due_of, text_of
from timeline.model import DEFAULT_GROUP, Status

LETTERS_AT_ONCE = 5_000
Tag = Annotated[str, Parameter(description="All messages of the group with this tag.")]
DryRun = Annotated[bool, Parameter(description="Only count.")]
Resume = Annotated[str | None, Parameter(description="`resume` of a call that broke off.")]


@patch(
    "/topics/{topic:str}/messages",
    operation_id="moveTag",
    summary="Move all messages of a tag",
    responses=documented(Status.NOT_FOUND),
)
async def move_tag(
    request: ApiRequest, client: CallerClient, topic: str, tag: Tag, data: MoveTag, dry_run: DryRun = False
) -> TagAnswer:
    """Move every message that has the tag at the start. A call that breaks off answers with `resume`; the same call
    with it continues there. `Idempotency-Key`: a repeat of the same request moves no message twice, and counts those
    that have moved like the first call."""
    if data.by is not None:
        if data.at is not None or data.in_ is not None:
            raise Invalid("by shifts each message, and goes without at and in")
        shift_ms(data.by, "by")
        when: dict[str, Any] = {"by": data.by}
    else:
        when = due_of(data.at, data.in_)
    name = text_of(topic)
    op = RepeatKey(request.key, name).operation("move tag", tag, data.at, data.in_, data.by, data.group)
    async with client.producer(name, data.group) as producer:
        told = await producer.move_tag(tag, dry_run=dry_run, resume=data.resume, operation_id=op, **when)
    return tag_answer(told, dry_run)


@delete(
    "/topics/{topic:str}/messages",
    operation_id="cancelTag",
    summary="Cancel all messages of a tag",
    status_code=200,
    responses=documented(Status.NOT_FOUND),
)
async def cancel_tag(
    client: CallerClient, topic: str, tag: Tag, group: str = DEFAULT_GROUP, leased: bool = False,
    dry_run: DryRun = False, resume: Resume = None,
) -> TagAnswer:  # fmt: skip
    """Cancel every message that has the tag at the start. See `moveTag`. It needs no `Idempotency-Key`: a repeat
    cancels and counts what is left."""
    async with client.producer(text_of(topic), group) as producer:
        return tag_answer(await producer.cancel_tag(tag, leased=leased, dry_run=dry_run, resume=resume), dry_run)


def tag_answer(told: TagProgress, dry_run: bool) -> TagAnswer:
    """Return how far a call by tag came."""
    return TagAnswer(
        matched=told.done,
        dry_run=dry_run,
        counts={str(status): count for status, count in told.counts.items()},
        changed=told.changed,
        finished=told.finished,
        resume=None if told.finished else told.resume,
    )


@post(
    "/topics/{topic:str}/dead:revive",
    operation_id="reviveDeadLetters",
    summary="Put dead letters back on the timeline",
    status_code=207,
    responses=documented(Status.NOT_FOUND),
)
async def revive(request: ApiRequest, client: CallerClient, topic: str, data: ReviveLetters) -> LettersAnswer:
    """Their deliveries count from 0 again. `Idempotency-Key`: a repeat of the same request revives no letter twice.
    With `ids` it gets the same answer; by `tag`, or with `all`, it counts what is left."""
    when = {"in_": 0} if data.at is None and data.in_ is None else due_of(data.at, data.in_)
    name = text_of(topic)
    key = RepeatKey(request.key, name)

    def call(ids: list[str]) -> Awaitable[Receipts]:
        return producer.revive(ids, operation_ids=key.operations("revive", ids, data.at, data.in_), **when)

    async with client.producer(name, data.group) as producer:
        return await _letters(client, name, data, call)


@post(
    "/topics/{topic:str}/dead:purge",
    operation_id="purgeDeadLetters",
    summary="Delete dead letters for good",
    status_code=207,
    responses=documented(Status.NOT_FOUND),
)
async def purge(client: CallerClient, topic: str, data: DeadLetters) -> LettersAnswer:
    """There is no way back. It needs no `Idempotency-Key`: a repeat answers NOT_FOUND for letters that are gone."""
    async with client.producer(text_of(topic), data.group) as producer:
        return await _letters(client, text_of(topic), data, producer.purge)


async def _letters(
    client: CallerClient, topic: str, asked: DeadLetters, call: Callable[[list[str]], Awaitable[Receipts]]
) -> LettersAnswer:
    if (asked.ids is not None, asked.tag is not None, asked.all).count(True) != 1:
        raise Invalid("give one of ids, tag and all")
    if asked.tag == "":
        raise Invalid("tag is empty: name a tag, or say all")
    found = LettersAnswer(counts={}, results=[], omitted=0)
    counts: Counter[str] = Counter()
    waiting: list[str] = []

    async def flush() -> None:
        receipts = await call(waiting)
        counts.update({str(status): count for status, count in receipts.counts.items()})
        for receipt in receipts if asked.ids is not None else receipts.failed:
            if asked.ids is not None or len(found.results) < FAILED_SHOWN:
                found.results.append(answer_of_receipt(receipt))
            else:
                found.omitted += 1
        waiting.clear()

    try:
        if asked.ids is not None:
            waiting += asked.ids
        else:
            async for letter in client.timeline.dead(topic, tag=asked.tag):
                if letter.group == asked.group:
                    waiting.append(letter.id)
                if len(waiting) >= LETTERS_AT_ONCE:
                    await flush()
        if waiting:
            await flush()
    except TimelineError as error:
        if not counts:  # the call as a whole has this answer
            raise
        found.stopped = sentence(error)
    found.counts = dict(counts)
    return found
