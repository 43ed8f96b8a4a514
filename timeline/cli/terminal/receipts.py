"""Receipts on the command line: a line each, and the exit code they come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import timeline
from timeline.cli.app import DONE, SOME_FAILED, complain, exit_code_of, explain, say
from timeline.cli.terminal.output import picked, print_json
from timeline.driver.times import shown_time
from timeline.errors import Forbidden, TimelineError
from timeline.model import Operation, Status

NO_WORDS: Mapping[str, str] = {}


@contextmanager
def speaking(words: Mapping[str, str]) -> Iterator[None]:
    """Has a refusal of one message speak of this command's options, where its own advice is for programs. `words`: what
    to do, by status."""
    try:
        yield
    except TimelineError as error:
        if error.id is not None:
            error.advice = words.get(error.code, error.advice)
        raise


def receipt_json(receipt: timeline.Receipt) -> dict[str, Any]:
    """A receipt for machines."""
    moved = ("moved",) if receipt.operation is Operation.PUT else ()
    detail = ("detail",) if receipt.detail else ()
    return picked(receipt, "id", "status", "version", "due", "due_ms", "settled", *moved, *detail)


def judged(receipts: Iterable[timeline.Receipt]) -> Iterator[tuple[timeline.Receipt, TimelineError | None]]:
    """Receipts of one call, each with the error that it stands for; None: it is OK. A broker says only once why a token
    has not the right, which is said of all that are FORBIDDEN."""
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
    """Prints a line for each: what was `done`, on standard error what was refused and why. Exit code: 0; 1 when some
    of several were refused; when the only one was, what its error means. `words`: what a refusal means here, by status,
    where its error speaks of something else."""
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
            id = receipt.id
            if receipt.status is not Status.DUPLICATE:
                say(f"{id} {done}{due}")
            elif receipt.settled:
                say(f"{id} not {done} again: it was delivered or cancelled before, and the topic remembers")
            else:
                say(f"{id} {done}{due} (it was there already, and stays as it is)")
    return code if count == 1 or not failed else SOME_FAILED


def counts_json(told: timeline.TagProgress, dry_run: bool) -> dict[str, Any]:
    """How far a call by tag came, for machines. `resume`: the token that continues it, null when it is finished."""
    return {
        "matched": told.done,
        "dry_run": dry_run,
        "counts": {str(status): n for status, n in told.counts.items()},
        **picked(told, "changed", "finished"),
        "resume": None if told.finished else told.resume,
    }


def tell_counts(told: timeline.TagProgress, as_json: bool, tag: str, done: str, dry_run: bool) -> int:
    """Print the counts of a call by `tag`; 1 when some were refused."""
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


_REFUSALS_BY_TAG: Mapping[Status, str] = {
    Status.FORBIDDEN: "these belong to another producer group: act for that one (--group NAME)",
    Status.INVALID: "these would come due beyond the topic's horizon ('timeline topic show' says how far that is), or "
    "not before they expire",
    Status.UNKNOWN: "these are gone, and an answer was lost: they were cancelled, or delivered first",
}
"""What a status means in the counts of a call by tag."""
