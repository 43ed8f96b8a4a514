"""Receipts on the command line: a line for each, and the exit code of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import timeline
from timeline.cli.app import DONE, SOME_FAILED, complain, exit_code_of, say
from timeline.cli.output import picked, print_json
from timeline.driver.times import shown_time
from timeline.errors import Forbidden, TimelineError, explain
from timeline.model import Operation, Status

NO_WORDS: Mapping[str, str] = {}
_REFUSALS_BY_TAG: Mapping[Status, str] = {
    Status.FORBIDDEN: "these belong to another producer group: act for that one (--group NAME)",
    Status.INVALID: "these would come due beyond the topic's horizon ('timeline topic show' says how far that is), or "
    "not before they expire",
    Status.UNKNOWN: "these are gone, and an answer was lost: they were cancelled, or delivered first",
}
"""The meaning of a status in the counts of a call by tag."""


@contextmanager
def speaking(words: Mapping[str, str]) -> Iterator[None]:
    """Give a refusal of one message advice about this command's options. `words`: what to do, by status."""
    try:
        yield
    except TimelineError as error:
        if error.id is not None:
            error.advice = words.get(error.code, error.advice)
        raise


def receipt_json(receipt: timeline.Receipt) -> dict[str, Any]:
    """Return a receipt for machines."""
    moved = ("moved",) if receipt.operation is Operation.PUT else ()
    detail = ("detail",) if receipt.detail else ()
    return picked(receipt, "id", "status", "version", "due", "due_ms", "settled", *moved, *detail)


def judged(receipts: Iterable[timeline.Receipt]) -> Iterator[tuple[timeline.Receipt, TimelineError | None]]:
    """Yield the receipts of one call, each with its error, or None when it is OK. A broker sends the reason of
    FORBIDDEN once; here every FORBIDDEN gets it."""
    denied = ""
    for receipt in receipts:
        found: TimelineError | None = None
        try:
            receipt.raise_failed()
        except TimelineError as error:
            found = error
            if isinstance(error, Forbidden):
                denied = error.reason = error.reason or denied
        yield receipt, found


def tell_receipts(
    receipts: Iterable[timeline.Receipt], as_json: bool, done: str, words: Mapping[str, str] = NO_WORDS
) -> int:
    """Print a line for each receipt: what was `done`, or on standard error why it was refused. Return 0, or 1 when
    some of several were refused, or the exit code of the only one's error. `words`: what to say of a status here."""
    failed, count, code = 0, 0, DONE
    for receipt, error in judged(receipts):
        count += 1
        if as_json:
            print_json(receipt_json(receipt))
        if error is not None:
            said = words.get(receipt.status)
            complain(explain(error) if said is None else f"{error.code} {receipt.id!r}: {said}")
            failed, code = failed + 1, exit_code_of(error)
        elif not as_json:
            due = f", due {shown_time(receipt.due_ms)}" if receipt.due_ms else ""
            if receipt.status is not Status.DUPLICATE:
                say(f"{receipt.id} {done}{due}")
            elif receipt.settled:
                say(f"{receipt.id} not {done} again: it was delivered or cancelled before, and the topic remembers")
            else:
                say(f"{receipt.id} {done}{due} (it was there already, and stays as it is)")
    return code if count == 1 or not failed else SOME_FAILED


def counts_json(told: timeline.TagProgress, dry_run: bool) -> dict[str, Any]:
    """Return the progress of a call by tag for machines. `resume`: the token that continues it, null at the end."""
    return {
        "matched": told.done,
        "dry_run": dry_run,
        "counts": {str(status): n for status, n in told.counts.items()},
        **picked(told, "changed", "finished"),
        "resume": None if told.finished else told.resume,
    }


def tell_counts(told: timeline.TagProgress, as_json: bool, tag: str, done: str, dry_run: bool) -> int:
    """Print the counts of a call by `tag`. Return 1 when some were refused."""
    counts, total = told.counts, told.done
    if as_json:
        print_json(counts_json(told, dry_run))
    elif not total:
        say(f"no message on the timeline has the tag {tag!r}: nothing {done}")
    else:
        would = "would be " if dry_run else ""
        others = ", ".join(f"{n} {status}" for status, n in counts.items() if status is not Status.OK)
        say(f"{told.changed} of {total} {would}{done}{'; ' + others if others else ''}")
        for status, why in _REFUSALS_BY_TAG.items():
            if status in counts:
                complain(f"{status}: {why}")
    return DONE if told.changed == total else SOME_FAILED
