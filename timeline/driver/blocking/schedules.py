"""Recurring schedules for plain threads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from timeline.driver.blocking.calls import Run, blocking
from timeline.driver.schedules import Schedule, ScheduleView
from timeline.driver.times import Duration

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


def editing(word: Callable[Concatenate[Any, P], Coroutine[Any, Any, Schedule]]) -> Callable[Concatenate[Any, P], Any]:
    """Return a method that calls the coroutine method `word`, which changes a schedule, and returns its own object."""
    call = blocking(word)

    @functools.wraps(call)
    def edit(self: SyncSchedule, /, *args: P.args, **kwargs: P.kwargs) -> SyncSchedule:
        call(self, *args, **kwargs)
        self._follow()
        return self

    return returning_this(edit)


def handing(
    word: Callable[Concatenate[Any, P], Coroutine[Any, Any, Schedule]],
) -> Callable[Concatenate[Any, P], SyncSchedule]:
    """Return a method that calls the coroutine method `word`, and returns its schedule for this thread."""
    call = blocking(word)

    @functools.wraps(call)
    def handed(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> SyncSchedule:
        return SyncSchedule(call(self, *args, **kwargs), self._run)

    return returning_this(handed)


def returning_this(method: F) -> F:
    """Return `method` with a signature that says what it returns here."""
    signature = inspect.signature(method).replace(return_annotation="SyncSchedule")
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


class SyncSchedule(ScheduleView):
    """A recurring schedule for a plain thread. See `Schedule`."""

    def __init__(self, target: Schedule, run: Run) -> None:
        self._target, self._run = target, run
        self._follow()

    def _follow(self) -> None:
        """Take what the asynchronous one knows."""
        vars(self).update(vars(self._target))

    refresh = editing(Schedule.refresh)

    def update(
        self, *, pending: str = "cancel", if_revision: int | None = None, timeout: Duration | None = None, **fields: Any
    ) -> SyncSchedule:
        """See Schedule.update."""
        self._run(self._target.update(pending=pending, if_revision=if_revision, timeout=timeout, **fields))
        self._follow()
        return self

    pause = editing(Schedule.pause)
    resume = editing(Schedule.resume)
    trigger = blocking(Schedule.trigger)
    backfill = blocking(Schedule.backfill)
    delete = blocking(Schedule.delete)
