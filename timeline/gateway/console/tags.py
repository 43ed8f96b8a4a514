"""All messages of a tag: counted, then moved or cancelled in steps, each of which the browser asks for by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from litestar import Response, post

from timeline.driver.mutations import TagProgress
from timeline.errors import Invalid, Throttled, TimelineError, Unavailable, Unknown
from timeline.gateway.console.visit import Fields, Visit, sentence, visiting
from timeline.gateway.requests import ApiRequest
from timeline.model import DEFAULT_GROUP, Status

STEP_MS = 1_000.0
"""A step ends after this time, with the chunk that it waits for then."""
DEEDS = ("count", "move", "cancel")
GO_ON = "To go on from here changes nothing twice."
FIELDS = ("topic", "tag", "group", "at", "in", "zone")


class _StepOver(Exception):
    """Ends a step at a chunk, and holds how far the call has come."""

    def __init__(self, told: TagProgress) -> None:
        super().__init__()
        self.told = told


@dataclass(frozen=True, slots=True)
class TagWork:
    """What is done with the messages of a tag, and how far it has come. `counted`: how many it was to change."""

    deed: str
    told: TagProgress
    counted: int
    resume: str = ""

    @property
    def refused(self) -> dict[str, int]:
        """Messages that were not, or would not be, changed, by status."""
        return {status.value: count for status, count in self.told.counts.items() if status != Status.OK}


@post("/tag/step", include_in_schema=False)
async def step(request: ApiRequest) -> Response[bytes]:
    """Do one step of counting, moving or cancelling the messages of a tag, and offer the next one."""
    async with visiting(request) as visit:
        form = await visit.form()
        deed, resume = form.text("do"), form.text("resume")
        if deed not in DEEDS:
            raise Invalid(f"do is count, move or cancel, not {deed!r:.40}")
        counted, trouble = form.number("counted"), ""
        try:
            told = await _called(visit, form, deed, resume)
            resume = ""
        except _StepOver as over:
            told, resume = over.told, over.told.resume
        except (Unavailable, Unknown, Throttled) as lost:
            told = _come_so_far(lost)
            trouble, resume = f"{lost.reason.rstrip('.') or 'The answer was lost'}. {GO_ON}", told.resume
        except Invalid as wrong:
            if deed == "count" or resume:
                raise
            deed, told, trouble = "count", TagProgress({Status.OK: counted}), sentence(wrong)
        work = TagWork(deed, told, counted, resume)
        fields = {name: form.exact(name) for name in FIELDS if form.has(name)}
        return visit.page("_tag_work.html", work=work, fields=fields, given=form, trouble=trouble)


async def _called(visit: Visit, form: Fields, deed: str, resume: str) -> TagProgress:
    """Ask for what the form says, from `resume` on. Raise _StepOver when a step's time is over."""
    tag = form.exact("tag")
    common: dict[str, Any] = {"resume": resume or None, "progress": _until(visit)}
    async with visit.client.producer(form.exact("topic"), form.text("group") or DEFAULT_GROUP) as producer:
        if deed == "move":
            return await producer.move_tag(tag, **form.due(), **common)
        return await producer.cancel_tag(tag, dry_run=deed == "count", **common)


def _until(visit: Visit) -> Callable[[TagProgress], None]:
    clock = visit.gateway.clock
    end_ms = clock.monotonic_ms() + STEP_MS

    def look(told: TagProgress) -> None:
        # Before its start is fixed, a call cannot go on from where it is.
        if told.started_ms and not told.finished and clock.monotonic_ms() >= end_ms:
            raise _StepOver(told)

    return look


def _come_so_far(lost: TimelineError) -> TagProgress:
    if not isinstance(lost.progress, TagProgress):
        raise lost
    return lost.progress
