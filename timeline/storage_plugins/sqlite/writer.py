"""The one writer: a thread that commits, in one transaction, all the work that waits for it.

While one transaction is on its way to the disk, the work of the next one gathers: group commit by pressure, no timer.
Leases and settles go ahead of puts and mutations. Each transaction has at least one put or mutation (every other one,
if that is heavy), so that puts go on however many topics lease and settle. If leases or settles wait, it has just that
one. Leases come last in a transaction, also those that came after it began. So a message that is put as due is leased
at once, with one commit for both. Nothing is answered before the commit. If the transaction fails, it is rolled back
and its works run again one by one, so that only the faulty one fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from timeline.storage_plugins.contract import StoreFull, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.sql.statements import Plan, drive
from timeline.storage_plugins.sqlite.dialect import BY_ROWS, answers, json_text

Result = TypeVar("Result")

SETTLES, LATER, LEASES = 0, 1, 2
"""The lines, in the order in which a transaction takes them. LATER is everything else."""
MOST_WEIGHT = 4_000
"""The most messages in one transaction, unless a single work or the first put is larger. With 8,000, the writer and
those who wait for it took turns: 32,800 cycles/s instead of 35,100."""
ENOUGH_WEIGHT = 1_000
"""A transaction of more ends early if leases or settles wait again: the longest that they wait for puts."""
ROWS_RESERVED = 1_000_000
ORPHANS_WORTHWHILE = 1_000
"""Fewer payloads without a message wait until no work has come for REST_S. Removing them is a commit, and one after
each ack would delay every second lease."""
REST_S = 0.05
ORPHANS_AT_ONCE = 4_000
ORPHANS_A_STEP = 500
ORPHANS_BYTES_AT_ONCE = 8 * 1024 * 1024
ORPHANS_PRESSING = 40_000
"""So many payloads without a message may wait for an idle moment. Beyond twice as many, leases and settles wait for
their removal."""
PROBE_BYTES = 256 * 1024
LEAST_ROOM_BYTES = 1024 * 1024, 256 * 1024
"""Without so much room in log and file, which is that of fifty small messages, all puts are refused."""
LOG_BYTES_EACH, FILE_BYTES_EACH = 20_000, 1_000
"""What a new message takes beside its payload and headers: in the log a page of each index, measured as 15,300."""


def unavailable(error: sqlite3.Error) -> StoreUnavailable:
    """Return the contract's error for an SQLite error before the commit."""
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    if name == "SQLITE_FULL":
        return StoreFull(f"{error} ({name}): free some space")
    return StoreUnavailable(f"{error} ({name})")


@dataclass(frozen=True, slots=True)
class Room:
    """What puts may write: `free_bytes` of the disk, and beside them `log_bytes` into the log's file and `file_bytes`
    into unused pages of the database."""

    free_bytes: int
    log_bytes: int = 0
    file_bytes: int = 0

    def fits(self, log_bytes: int, file_bytes: int) -> bool:
        """Return whether so much may be written to the log, and then carried into the file."""
        return max(0, log_bytes - self.log_bytes) + max(0, file_bytes - self.file_bytes) <= self.free_bytes


@dataclass(slots=True)
class Transaction:
    """The tools of a work: the connection, the writer, and notes that count only once it is committed."""

    connection: sqlite3.Connection
    writer: SqliteWriter
    orphans: list[tuple[int, int]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Calls that restore memory if the transaction is rolled back."""
    weight: int = 0
    """The weight of the work under way. The work lowers it if it touches fewer messages."""
    commit_seq: int = 0
    """The number of the work under way, counted from when the writer started."""
    claimed: tuple[int, int] = (0, 0)
    """What its puts write to the log and to the file."""

    def run(self, plan: Plan[Result]) -> Result:
        """Run a plan in this transaction."""
        return drive(plan, partial(answers, self.connection))

    def claim(self, count: int, size: int) -> bool:
        """Claim room for `count` new messages, `size` bytes of payloads and headers in all. Return whether they leave
        the space that leases and settles need. Raise StoreFull if they do not beside others of this transaction, which
        is then undone, and each work gets one of its own."""
        log_bytes, file_bytes = self.claimed
        self.claimed = log_bytes + size + count * LOG_BYTES_EACH, file_bytes + size + count * FILE_BYTES_EACH
        if self.writer.room.fits(*self.claimed):
            return True
        if log_bytes:
            raise StoreFull(self.writer.cramped)
        return False

    def orphan(self, rows: list[int], sizes: list[int]) -> None:
        """Note payloads (by row, with their sizes in bytes) whose messages are gone. An idle moment removes them."""
        self.orphans += zip(rows, sizes, strict=True)


@dataclass(slots=True, eq=False)
class Work(Generic[Result]):
    """A piece of a transaction, and the future that waits for it."""

    act: Callable[[Transaction], Result]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Result]
    priority: int
    weight: int
    result: Any = None
    error: BaseException | None = None

    def __call__(self, transaction: Transaction) -> None:
        transaction.weight = self.weight
        self.result = self.act(transaction)
        self.weight = transaction.weight

    def settle(self) -> None:
        """Set the outcome, on the event loop, if a caller still waits."""
        if self.answer.done():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class SqliteWriter:
    """Owns the writing connection from `start` to `stop`. `trouble` names what makes writing impossible: a full disk
    (until a probe as large as a batch is written) or a malformed page (until reopened). `committed` takes the number
    of changed rows after each commit. `lost`, asked before each commit, returns why it would be lost. `measure`,
    asked after it, returns the room for puts. `cramped`: why others are refused."""

    def __init__(
        self, connection: sqlite3.Connection, committed: Callable[[int], None], lost: Callable[[], str],
        measure: Callable[[sqlite3.Connection], Room], cramped: str,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._committed, self._lost, self._measure, self.cramped = committed, lost, measure, cramped
        self._ready = threading.Condition()
        self._waiting: tuple[deque[Work[Any]], deque[Work[Any]], deque[Work[Any]]] = (deque(), deque(), deque())
        self._stopping = False
        self._clean = False
        self._chores_wait = False
        self._rest = False
        self._heavy_next = False
        self._commit_seq = 0
        self._orphans: deque[tuple[int, int]] = deque()
        self._next_row, self._reserved = 0, 0
        self.trouble: dict[str, str] = {}
        self.room = measure(connection)
        self._thread = threading.Thread(target=self._run, name="timeline-sqlite-writer", daemon=True)

    def start(self) -> None:
        """Begin to work. The connection belongs to the thread from here on."""
        mark = self._connection.execute("SELECT value FROM meta WHERE name = 'reserved_rows'").fetchone()
        last = self._connection.execute("SELECT max(row) FROM message").fetchone()
        self._next_row = self._reserved = max(int(mark[0]) if mark else 0, int(last[0] or 0))
        self._thread.start()

    def stop(self, clean: bool) -> None:
        """Finish all work, remove payloads without a message, and close the connection. Block until then. `clean`: no
        other such payloads are possible, so that the next process need not look for any."""
        with self._ready:
            self._stopping = True
            self._clean = clean
            self._ready.notify()
        self._thread.join()

    def submit(self, act: Callable[[Transaction], Result], priority: int, weight: int) -> asyncio.Future[Result]:
        """Put a work in line. Its result, StoreUnavailable or StoreUnknown comes after the commit."""
        loop = asyncio.get_running_loop()
        work: Work[Result] = Work(act, loop, loop.create_future(), priority, weight)
        with self._ready:
            if self._stopping:
                raise StoreUnavailable("the store is closed")
            self._waiting[priority].append(work)
            self._ready.notify()
        return work.answer

    def reserve(self, count: int) -> int:
        """Return the first of `count` new row numbers. The mark beyond them is written with the running transaction.
        Gaps are harmless."""
        first = self._next_row + 1
        self._next_row += count
        if self._next_row > self._reserved:
            self._reserved = self._next_row + ROWS_RESERVED
            self._connection.execute(
                "INSERT OR REPLACE INTO meta (name, value) VALUES ('reserved_rows', ?)", (str(self._reserved),)
            )
        return first

    def carry_rest(self) -> None:
        """Ask the writer to carry the rest of the log before the next transaction, which may then restart the log."""
        with self._ready:
            self._rest = True
            self._ready.notify()

    # ── the thread ──

    def _run(self) -> None:
        works: list[Work[Any]] = []
        try:
            while self._wait():
                if any(self._waiting):
                    self._commit_all(works)
                    self._answer(works)
                answered, works = works, []
                rest, self._rest = self._rest, False
                if rest:
                    self._reuse_log()
                if not (answered or rest) or (len(self._orphans) > ORPHANS_PRESSING and not self._chores_wait):
                    self._remove_orphans()
            while self._orphans and self._remove_orphans():
                pass
            if self._clean and not self._orphans:
                self._transact([_mark_clean])
        finally:
            self._connection.close()
            self._refuse(works)

    def _refuse(self, begun: list[Work[Any]]) -> None:
        """Refuse all work, since the thread ends. If it ends by a bug, no caller may wait for ever: not later ones,
        those in line, or those `begun` and not answered."""
        with self._ready:
            self._stopping = True
            left = [work for line in self._waiting for work in line]
        for work in begun:
            work.error = work.error or StoreUnknown("the store's writer ended in the middle of it: see the log")
        for work in left:
            work.error = StoreUnavailable("the store's writer has ended: restart the broker")
        self._answer([*begun, *left])

    def _wait(self) -> bool:
        """Wait for works, or for time for chores; return False at the end."""
        with self._ready:
            rested = False
            while not any(self._waiting) and not self._rest:
                if self._stopping:
                    return False
                if not self._orphans or self._chores_wait:
                    self._ready.wait()
                elif rested or len(self._orphans) >= ORPHANS_WORTHWHILE:
                    return True
                else:
                    rested = not self._ready.wait(REST_S)
            return True

    def _commit_all(self, works: list[Work[Any]]) -> None:
        """Commit the waiting works together, as many as fit into a transaction; if that fails, one by one. Fills
        `works` with those that it took off the lines."""
        error = self._transact(self._in_turn(works))
        if error is None:
            self._chores_wait = False
            if "full" in self.trouble:
                self._reuse_log()
            return
        began = bool(works)
        if not began:
            works.extend(self._in_turn([]))  # else they would wait for ever, and this thread try without a pause
        if len(works) == 1 or not began or isinstance(error, StoreUnknown):
            for work in works:
                work.error = error
            return
        for work in works:
            work.error = self._transact([work])

    def _in_turn(self, works: list[Work[Any]]) -> Iterator[Work[Any]]:
        """Take the waiting works off their lines into `works`: at least one of each line, and more while no other has
        to wait too long. A heavy put takes turns with leases and settles instead: in one transaction with it, they
        would wait for it twice, behind it and beside it."""
        weight, counts = 0, [len(line) for line in self._waiting]
        leases = True
        if self._hurried() and counts[LATER] and self._waiting[LATER][0].weight > ENOUGH_WEIGHT:
            self._heavy_next = leases = not self._heavy_next
            for number in (LATER,) if leases else (SETTLES, LEASES):
                counts[number] = 0
        for number, line in enumerate(self._waiting):
            if number == LEASES and leases:
                counts[LEASES] = len(line)
            for at in range(counts[number]):
                work = line[0]
                pressing = number == LATER and weight >= ENOUGH_WEIGHT and self._hurried()
                if at and (pressing or weight + work.weight > MOST_WEIGHT):
                    break
                works.append(line.popleft())
                yield work
                weight += work.weight

    def _hurried(self) -> bool:
        """Return whether leases or settles wait."""
        return bool(self._waiting[SETTLES] or self._waiting[LEASES])

    def _transact(self, acts: Iterable[Callable[[Transaction], None]]) -> Exception | None:
        """Do one transaction. Return None, or why nothing of it happened (StoreUnknown: why that is not known)."""
        transaction = Transaction(self._connection, self)
        reserved, changes = self._reserved, self._connection.total_changes
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for act in acts:
                self._commit_seq += 1
                transaction.commit_seq = self._commit_seq
                act(transaction)
            if why := self._lost():
                raise StoreUnavailable(why)
        except Exception as error:
            self._reserved = reserved
            self._roll_back(transaction)
            return self.judged(error)
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._reserved = reserved
            self._roll_back(transaction)
            judged = self.judged(error)
            return judged if self._surely_undone(error) else StoreUnknown(f"the commit failed: {error}")
        self._orphans += transaction.orphans
        self._committed(self._connection.total_changes - changes)
        self.room = self._measure(self._connection)
        if not self._has_room():
            self.trouble["full"] = self.cramped
        return None

    def judged(self, error: Exception) -> Exception:
        """Return the error as the contract has it. A work may raise an error of its own."""
        if not isinstance(error, sqlite3.Error):
            return error
        judged = unavailable(error)
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            self.trouble["full"] = judged.reason
            self._reuse_log()
        elif name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            self.trouble["damaged"] = f"{judged.reason}: restore the file from a backup, or move its messages out"
        return judged

    def _roll_back(self, transaction: Transaction) -> None:
        for undo in reversed(transaction.undo):
            undo()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            # SQLite rolls back by itself after some errors. Otherwise nothing can be written any more.
            if self._connection.in_transaction:
                self.trouble["damaged"] = f"a transaction could not be rolled back: {error}"

    def _reuse_log(self) -> None:
        """Carry the log to its place, so that the next transaction overwrites it instead of appending. That is when
        little is left of it, and around a full disk, where settles free space."""
        try:
            if not self._connection.in_transaction:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error:
            return  # not even that fits; the next failure tries again

    def _surely_undone(self, error: sqlite3.Error) -> bool:
        """Return whether a failed commit surely did not happen. After an I/O error its frames may lie in the log,
        complete but perhaps not on disk, and a recovery would read them. The next commit overwrites them."""
        if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
            return True
        try:
            self._connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('probe', '')")
        except sqlite3.Error:
            return False
        return True

    def _answer(self, works: list[Work[Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Work[Any]]] = {}
        for work in works:
            by_loop.setdefault(work.loop, []).append(work)
        for loop, answered in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle_all, answered)
            except RuntimeError:
                continue  # that loop was closed, with all that waited there

    def _remove_orphans(self) -> bool:
        """Remove some payloads whose messages are gone, in row order, so that they share pages. Return False if that
        failed: they wait until another transaction succeeds."""
        taken: list[tuple[int, int]] = []
        room = ORPHANS_BYTES_AT_ONCE
        while self._orphans and len(taken) < ORPHANS_AT_ONCE and (not taken or self._orphans[0][1] <= room):
            taken.append(self._orphans.popleft())
            room -= taken[-1][1]
        taken.sort()
        left = taken[:]
        if self._transact(self._removals(left)) is None:
            self._orphans.extendleft(left)
            return True
        self._orphans.extendleft(reversed(taken))
        self._chores_wait = True
        return False

    def _removals(self, left: list[tuple[int, int]]) -> Iterator[Callable[[Transaction], None]]:
        """Remove `left` step by step, all of it or until a lease or settle has waited for a step."""
        pressed = len(self._orphans) > 2 * ORPHANS_PRESSING
        while left:
            rows = [row for row, _ in left[:ORPHANS_A_STEP]]
            del left[:ORPHANS_A_STEP]
            yield partial(_delete_payloads, rows)
            if self._hurried() and not pressed:
                return

    def probe(self, transaction: Transaction) -> None:
        """Prove, as a work, that writing works: small normally, as large as a batch after a full disk."""
        size = PROBE_BYTES if "full" in self.trouble else 8
        transaction.connection.execute(
            "INSERT OR REPLACE INTO meta (name, value) VALUES ('probe', hex(randomblob(?)))", (size // 2,)
        )

    def proven(self) -> None:
        """Note a committed probe. Raise StoreFull while the disk has no space for more."""
        if not self._has_room():
            raise StoreFull(self.trouble["full"])
        self.trouble.pop("full", None)

    def _has_room(self) -> bool:
        return self.room.fits(*LEAST_ROOM_BYTES)


def _settle_all(works: list[Work[Any]]) -> None:
    for work in works:
        work.settle()


def _delete_payloads(rows: list[int], transaction: Transaction) -> None:
    transaction.connection.execute(f"DELETE FROM payload WHERE {BY_ROWS}", (json_text(rows),))


def _mark_clean(transaction: Transaction) -> None:
    transaction.connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('clean', '1')")
