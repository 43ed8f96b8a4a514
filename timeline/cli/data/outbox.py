"""`timeline outbox …`: the relay of an outbox, its table, and the rows that were rejected."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

import timeline
from timeline.cli.app import DONE, INTERRUPTED, SOME_FAILED, Suggesting, complain, needing, say
from timeline.cli.options import (
    ClientOptions,
    Url,
    address_option,
    check_addresses,
    credential_options,
    every_option,
    json_option,
    timeout_option,
    yes_option,
)
from timeline.cli.output import Progress, confirm, id_cell, picked, print_json, print_table, time_cell
from timeline.driver.times import duration_ms, iso_or_none
from timeline.errors import Invalid
from timeline.model import Status
from timeline.outbox import DIALECTS, TABLE, ddl

if TYPE_CHECKING:
    from timeline.outbox.database import Outbox, OutboxCounts, OutboxRow
    from timeline.outbox.relay import RelayMetrics

URL_VARIABLE = "TIMELINE_OUTBOX"

table_option = click.option("--table", default=TABLE, metavar="NAME", help="Table of the outbox.")


class _RelayUnlessNamed(Suggesting):
    """`timeline outbox URL` is `timeline outbox relay URL`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        if not named and any("://" in word or word.startswith("@") for word in args):
            args = ["relay", *args]
        return super().parse_args(context, args)


@click.group(cls=_RelayUnlessNamed)
def outbox() -> None:
    """Send what a transaction added to the outbox in its database, once it has committed.

    'timeline outbox URL' is 'timeline outbox relay URL'.

    \b
    Example:
      timeline outbox ddl --dialect postgresql | psql shop
      timeline outbox postgresql://shop@localhost/shop
    """


def database_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command that asks the database takes."""
    url = click.argument("url", envvar=URL_VARIABLE, type=Url(f", or set {URL_VARIABLE}"))
    return url(table_option(json_option(function)))


def chosen_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command takes that changes some or all of the rows that were rejected."""
    seqs = click.argument("seqs", nargs=-1, type=int, metavar="SEQ…")
    every = click.option("--all", "everything", is_flag=True, help="All that were rejected.")
    return database_command(seqs(every(function)))


@outbox.command("ddl")
@click.option("--dialect", required=True, type=click.Choice(DIALECTS), help="Database. mysql is for MariaDB, too.")
@table_option
def print_ddl(dialect: str, table: str) -> int:
    """Print the SQL that creates the outbox's table, for your migrations or straight into the database.

    \b
    Example:
      timeline outbox ddl --dialect sqlite | sqlite3 shop.db
    """
    for made in ddl(dialect, table):
        say(*f"{made};".splitlines())
    return DONE


@outbox.command()
@database_command
@every_option(default="200ms", help="Time between two looks when idle.")
@click.option("--batch", default=1_000, type=click.IntRange(1, 10_000), help="Rows per batch.")
@click.option("--once", is_flag=True, help="Send what waits now, then end. Exit code 1 when rows were rejected.")
@click.option("--metrics", default="off", metavar="HOST:PORT|off", help="Address of /metrics.")
@timeout_option
@address_option
@credential_options
def relay(
    url: str, table: str, as_json: bool, every: int, batch: int, once: bool, metrics: str, timeout: str, address: str
) -> int:
    """Relay the outbox in the database at URL (TIMELINE_OUTBOX) to a broker until SIGTERM or Ctrl-C.

    Several relays may share a table of PostgreSQL or MySQL. With SQLite, one relays at a time and the others wait.
    While the broker or the database is away, the relay waits, then goes on. --json prints an object for each batch.

    \b
    Example:
      timeline outbox postgresql://shop@localhost/shop --metrics 127.0.0.1:9002
      timeline outbox sqlite:////var/lib/shop/shop.db --once
    """
    timeout_s = duration_ms(timeout, "--timeout", least_ms=1) / 1000
    check_addresses(address)
    found = _opened(url, table, idle_s=60 + int(4 * timeout_s + every / 1000))

    async def work(tl: timeline.Timeline) -> int:
        from timeline.outbox.relay import OutboxRelay, RelayMetrics

        figures, close = RelayMetrics(), None
        measured = "off"
        if metrics != "off":
            measured, close = figures.serve(metrics)
        teller = _Teller(figures, as_json)
        try:
            made = OutboxRelay(found, tl, teller, every, batch)
            # Other threads get no signals.
            here = threading.current_thread() is threading.main_thread()
            for number in (signal.SIGINT, signal.SIGTERM) if here else ():
                asyncio.get_running_loop().add_signal_handler(number, made.stop)
            teller.begun(found, address, measured)
            idle = await made.run(once)
        finally:
            teller.ended()
            if close is not None:
                close()
        if not once:
            return DONE
        return INTERRUPTED if not idle else SOME_FAILED if teller.refusals else DONE

    return ClientOptions(address, timeout, as_json).run(work)


@outbox.command("list")
@database_command
@click.option("--limit", default=100, type=click.IntRange(1), help="At most N rows.")
def list_set_aside(url: str, table: str, as_json: bool, limit: int) -> int:
    """List the rows that were rejected, with the reasons. Count the waiting ones.

    \b
    Example:
      timeline outbox list postgresql://shop@localhost/shop
    """
    found = _opened(url, table)
    rows, count = _asked(found, lambda: (found.set_aside(limit), found.waiting()))
    if as_json:
        for row in rows:
            told = {
                "seq": row.seq,
                "topic": row.topic,
                "group": row.group,
                "id": row.id,
                "due": iso_or_none(row.due_ms or 0),
            }
            print_json(told | picked(row, "refused", "refused_ms") | {"reason": row.reason})
        return DONE
    print_table(
        ("SEQ", "TOPIC", "ID", "SET ASIDE", "REASON"),
        [(row.seq, row.topic, id_cell(row.id), time_cell(row.refused_ms), row.reason) for row in rows],
        right=("SEQ",),
        empty="nothing was rejected",
        spare=("SET ASIDE", "TOPIC"),
    )
    say(f"{count.waiting:,} waiting, {count.set_aside:,} rejected")
    return DONE


@outbox.command()
@chosen_command
def retry(url: str, table: str, as_json: bool, seqs: tuple[int, ...], everything: bool) -> int:
    """Let what was rejected wait again, so that the relay sends it.

    \b
    Example:
      timeline outbox retry postgresql://shop@localhost/shop --all
    """
    return _changed(url, table, as_json, seqs, everything, "waits again", lambda found: found.retry)


@outbox.command()
@yes_option
@chosen_command
def purge(url: str, table: str, as_json: bool, seqs: tuple[int, ...], everything: bool, yes: bool) -> int:
    """Delete what was rejected, for good.

    \b
    Example:
      timeline outbox purge postgresql://shop@localhost/shop 4711 --yes
    """
    if not yes and bool(seqs) != everything:
        confirm(f"Delete {'all that was rejected' if everything else f'{len(seqs)} messages'} of {table} for good?")
    return _changed(url, table, as_json, seqs, everything, "deleted", lambda found: found.purge)


def _changed(
    url: str, table: str, as_json: bool, seqs: tuple[int, ...], everything: bool, done: str,
    change: Callable[[Outbox], Callable[[list[int] | None], int]],
) -> int:  # fmt: skip
    if bool(seqs) == everything:
        raise Invalid("give either one or more SEQs, as 'timeline outbox list' shows them, or --all, one of the two")
    found = _opened(url, table)
    count = _asked(found, lambda: change(found)(None if everything else list(seqs)))
    asked = count if everything else len(set(seqs))
    if as_json:
        print_json({"asked": asked, "done": count})
    else:
        say(f"{count} of {asked} {done}")
    return DONE if count == asked else SOME_FAILED


def _opened(url: str, table: str, idle_s: int = 60) -> Outbox:
    """Return the outbox at `url`, after one connection to check it. Raises Failed when a package is missing."""
    with needing("outbox", "the outbox's relay needs"):
        from timeline.outbox.database import Outbox
    found = Outbox(url, table, idle_s)
    try:
        found.open()
    except BaseException:
        found.close()
        raise
    return found


def _asked(found: Outbox, ask: Callable[[], Any]) -> Any:
    """Return what the database answers. Raises its error as one of ours."""
    from sqlalchemy.exc import DBAPIError

    try:
        return ask()
    except DBAPIError as trouble:
        raise found.explained(trouble) from trouble
    finally:
        found.close()


class _Teller:
    """Reports what the relay does: to people or machines, and to its metrics."""

    def __init__(self, figures: RelayMetrics, as_json: bool) -> None:
        self._figures, self._as_json = figures, as_json
        self._progress = Progress("relayed")
        self._done: Counter[str] = Counter()
        self.refusals = 0

    def begun(self, found: Outbox, address: str, metrics: str) -> None:
        if self._as_json:
            told = {"outbox": found.shown, "table": found.table, "address": address, "metrics": metrics}
            print_json(told | {"shares": found.shares})
            return
        measured = "" if metrics == "off" else f", metrics on {metrics}"
        say(f"timeline relays {found.table} of {found.shown} to {address}{measured}")

    def sent(self, topic: str, status: Status, count: int) -> None:
        self._done[status] += count
        self._figures.sent(topic, str(status), count)
        self._progress.add(count)
        if self._as_json:
            print_json({"topic": topic, "status": str(status), "sent": count})

    def refused(self, row: OutboxRow, status: Status, reason: str) -> None:
        self.refusals += 1
        self._figures.refused(row.topic, str(status))
        if self._as_json:
            told = {"topic": row.topic, "id": row.id, "seq": row.seq}
            print_json(told | {"status": str(status), "refused": reason})
        self._say(f"rejected: {row.topic} {row.id!r} (seq {row.seq}): {status}: {reason}")

    def trouble(self, reason: str) -> None:
        self._figures.trouble(bool(reason))
        if self._as_json:
            print_json({"trouble": reason})
        self._say(f"waiting: {reason}" if reason else "going on")

    def warned(self, sentence: str) -> None:
        self._say(sentence)

    def counted(self, waiting: OutboxCounts, oldest_s: float) -> None:
        self._figures.counted(waiting, oldest_s)

    def ended(self) -> None:
        self._progress.clear()
        was_there = self._done[Status.DUPLICATE]
        done = sum(self._done.values())
        if self._as_json:
            print_json({"done": done, "duplicates": was_there, "set_aside": self.refusals})
            return
        again = f", {was_there:,} of them were there before" if was_there else ""
        aside = f"; {self.refusals:,} rejected, see 'timeline outbox list'" if self.refusals else ""
        say(f"{done:,} relayed{again}{aside}")

    def _say(self, sentence: str) -> None:
        self._progress.clear()
        complain(sentence)
