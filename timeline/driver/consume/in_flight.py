"""What a consumer has in hand: frames of deliveries, each message waiting, handed out, being settled or done. Pure: the
monotonic time is handed in.

A frame is one Deliver frame; its columns stay as they arrived and a state byte is kept for each message, so that a
thousand deliveries are one object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Bools, Indexes, Int64, Ragged, UInt64
from timeline.errors import Invalid
from timeline.model import MAX_BATCH
from timeline.wire.frames import Deliver

HELD, RIDING, LEFT, GIVEN = 0, 1, 2, 3
"""With the message; on its way with a settle that is not answered; the same, of a message that is done with whatever
the answer says; owed or given back."""

Ride: TypeAlias = list[tuple["DeliveredFrame", Indexes]]


class SettledPlaces:
    """Which messages in flight a column of settles is about, in order; None for a frame: settles that end nothing.
    It is a column too: `places[at]` are those at ascending `at`."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[tuple[DeliveredFrame | None, Indexes]]) -> None:
        self.parts = parts

    def __getitem__(self, at: Indexes) -> SettledPlaces:
        ends = np.cumsum([len(indexes) for _, indexes in self.parts])
        cuts = [0, *np.searchsorted(at, ends).tolist()]
        parts = []
        for number, (frame, indexes) in enumerate(self.parts):
            mine = at[cuts[number] : cuts[number + 1]]
            if len(mine):
                parts.append((frame, indexes[mine - (int(ends[number]) - len(indexes))]))
        return SettledPlaces(parts)


class CreditLedger:
    """The credit of one consumer, `messages` and `nbytes` in all."""

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages, self.bytes = messages, nbytes
        self.owed_messages = self.owed_bytes = 0
        """To go back by itself."""
        self.held_messages = self.held_bytes = 0
        """Not given back: a broker must not send more while this is all."""
        self._rides: dict[int, Ride] = {}
        self._returned = False

    def arrive(self, frame: DeliveredFrame) -> None:
        """A frame came: its messages hold so much."""
        self._returned = False
        self.held_messages += len(frame)
        self.held_bytes += int(frame.sizes.sum())

    @property
    def owed(self) -> bool:
        """Whether there is something to send by itself."""
        return self.owed_messages > 0 or self.owed_bytes > 0

    def runs_dry(self) -> bool:
        """Whether some went back since a frame came, or since this was asked, and so little is free all the same that
        the broker may wait for more before it leases."""
        returned, self._returned = self._returned, False
        return returned and (4 * self.held_messages > 3 * self.messages or 4 * self.held_bytes > 3 * self.bytes)

    def take_owed(self) -> tuple[int, int]:
        """What is owed, to be sent now: (messages, bytes)."""
        self._returned = True
        messages, nbytes = max(0, self.owed_messages), max(0, self.owed_bytes)
        self.owed_messages -= messages
        self.owed_bytes -= nbytes
        return messages, nbytes

    def give(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Messages are done with: what they hold is owed, once; what rides is as soon as it turns out not to count."""
        credit = np.frombuffer(frame.credit, dtype=np.uint8)
        states = credit[at]
        if (states == GIVEN).all():
            return
        credit[at[states == RIDING]] = LEFT
        self._owe(frame, distinct(at[states == HELD]))

    def give_one(self, frame: DeliveredFrame, index: int) -> None:
        """`give` for one message."""
        state = frame.credit[index]
        if state == RIDING:
            frame.credit[index] = LEFT
        elif state == HELD:
            self._owe(frame, np.array([index]))

    def board(self, request: int, places: SettledPlaces) -> tuple[int, int]:
        """The credit that goes with Settle `request`: (messages, bytes) of what no earlier one took along. While a
        message larger than all credit is made up for, all goes by itself, after the answer."""
        if self.owed_messages < 0 or self.owed_bytes < 0:
            return 0, 0
        ride: Ride = []
        messages = nbytes = 0
        for frame, at in places.parts:
            if frame is None:
                continue
            if len(at) == 1:
                index = int(at[0])
                if frame.credit[index] != HELD:
                    continue
                frame.credit[index] = RIDING
                messages += 1
                nbytes += int(frame.sizes[index])
            else:
                credit = np.frombuffer(frame.credit, dtype=np.uint8)
                at = distinct(at[credit[at] == HELD])
                if not len(at):
                    continue
                credit[at] = RIDING
                messages += len(at)
                nbytes += int(frame.sizes[at].sum())
            ride.append((frame, at))
        if ride:
            self._rides[request] = ride
        return messages, nbytes

    def land(self, request: int, counts: bool) -> None:
        """Settle `request` was answered, or cannot be sent: what rode with it is given back when it `counts`. Otherwise
        messages hold it again, and it is owed for those that are done with."""
        self._returned |= counts
        for frame, at in self._rides.pop(request, ()):
            if counts and len(at) == 1:  # as the array way below, for a fifth of what that costs
                index = int(at[0])
                frame.credit[index] = GIVEN
                self.held_messages -= 1
                self.held_bytes -= int(frame.sizes[index])
                continue
            credit = np.frombuffer(frame.credit, dtype=np.uint8)
            if counts:
                credit[at] = GIVEN
                self._forget(frame, at)
            else:
                left = at[credit[at] == LEFT]
                credit[at] = HELD
                self._owe(frame, left)

    def room(self) -> tuple[int, int]:
        """Credit for a new stream, besides what is held: what rode on the last one rides anew when it is settled again.
        Where one message is larger than all credit, less than nothing is owed: it is made up for as that comes back."""
        for request in list(self._rides):
            self.land(request, counts=False)
        messages, nbytes = self.messages - self.held_messages, self.bytes - self.held_bytes
        self.owed_messages, self.owed_bytes = min(0, messages), min(0, nbytes)
        return messages - self.owed_messages, nbytes - self.owed_bytes

    def _owe(self, frame: DeliveredFrame, at: Indexes) -> None:
        if len(at):
            np.frombuffer(frame.credit, dtype=np.uint8)[at] = GIVEN
            messages, nbytes = self._forget(frame, at)
            self.owed_messages += messages
            self.owed_bytes += nbytes

    def _forget(self, frame: DeliveredFrame, at: Indexes) -> tuple[int, int]:
        sizes: Int64 = frame.sizes[at]
        messages, nbytes = len(at), int(sizes.sum())
        self.held_messages -= messages
        self.held_bytes -= nbytes
        return messages, nbytes


def distinct(at: Indexes) -> Indexes:
    """Each index once: a caller may name a message twice."""
    return at if len(at) < 2 or bool((at[1:] > at[:-1]).all()) else np.unique(at)


def check_credit(credit: Any, name: str, most: int) -> int:
    """`credit` when it is a whole number from 1, else Invalid."""
    if isinstance(credit, bool) or not isinstance(credit, int) or not 1 <= credit <= most:
        raise Invalid(f"{name} must be a whole number from 1 to {most}, not {credit!r}")
    return credit


WAITING, HANDED, SETTLING, DONE = 0, 1, 2, 3
"""In the buffer; with a person's code; a settle of it is on its way; settled or lost."""


@dataclass(slots=True)
class Stats:
    """Counters of a consumer since it was made. `dropped`: deliveries whose lease ended before they were handed out.
    `damaged`: arrived with a wrong checksum, and buried. `lost`: handed out, and the lease ended before a settle.
    `settle_errors`: settles of `ack_soon` and its kind that failed. `released_unseen`: handed back from the buffer.
    `reconnects`: streams that ended before the consumer did."""

    delivered: int = 0
    dropped: int = 0
    damaged: int = 0
    lost: int = 0
    settle_errors: int = 0
    released_unseen: int = 0
    reconnects: int = 0


class DeliveredFrame:
    """The messages of one Deliver frame. `end_ms`: when each lease ends on the monotonic clock; `until_ms`: on the
    broker's. `sizes`: bytes each takes of the credit."""

    __slots__ = (
        "columns",
        "credit",
        "cursor",
        "earliest_ms",
        "end_ms",
        "extend_at_ms",
        "lost",
        "open",
        "sizes",
        "soon",
        "state",
        "until_ms",
        "waiting",
    )

    def __init__(self, columns: Deliver, end_ms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        count = len(columns.birth)
        self.columns = columns
        self.end_ms = end_ms
        self.until_ms: Int64 = columns.lease_until_ms.copy()
        self.sizes: Int64 = columns.payloads.sizes
        if columns.headers is not None:
            self.sizes = self.sizes + columns.headers.sizes
        self.state = bytearray(count)
        self.credit = bytearray(count)
        """Where the credit of each is: see `credit`."""
        self.lost = bytearray(count)
        """1 where the lease is known to have ended, or somebody else to have the message."""
        self.cursor = 0
        self.waiting = self.open = count
        self.earliest_ms = float(end_ms.min()) if count else 0.0
        self.extend_at_ms = float("inf")
        self.soon: list[int] = []
        """Indexes that `ack_soon` named, not yet sent."""

    def __len__(self) -> int:
        return len(self.state)

    def where(self, state: int) -> Indexes:
        """Indexes of messages in `state`."""
        return np.flatnonzero(np.frombuffer(self.state, dtype=np.uint8) == state)

    def ended(self, now_ms: float) -> Bools:
        """Which leases have ended by monotonic `now_ms`."""
        ended: Bools = self.end_ms <= now_ms
        return ended

    def mark(self, at: Indexes, state: int) -> None:
        """Sets the state of messages (to WAITING goes back one at a time, by `InFlight.put_back`), and counts."""
        at = distinct(at)
        view = np.frombuffer(self.state, dtype=np.uint8)
        before = view[at]
        self.waiting -= int((before == WAITING).sum())
        done = int((before == DONE).sum())
        self.open += done - len(before) if state == DONE else done
        view[at] = state

    def extended(self, at: Indexes, until_ms: Int64, end_ms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """The leases of messages at `at` end later now."""
        self.until_ms[at] = until_ms
        self.end_ms[at] = end_ms
        self.earliest_ms = float(self.end_ms.min())


class InFlight:
    """All frames in hand, in order of arrival, and the credit."""

    def __init__(self, credit_messages: int, credit_bytes: int) -> None:
        self.credit = CreditLedger(credit_messages, credit_bytes)
        self.stats = Stats()
        self._frames: dict[int, DeliveredFrame] = {}
        self._queue: deque[DeliveredFrame] = deque()
        self._given_up: deque[tuple[float, Ragged, UInt64, Int64]] = deque()
        self.awaited = 0
        """How many wait for a message."""

    def arrive(self, frame: DeliveredFrame) -> None:
        """A frame came."""
        self._frames[id(frame)] = frame
        self.credit.arrive(frame)
        if frame.waiting:
            self._queue.append(frame)

    @property
    def frames(self) -> list[DeliveredFrame]:
        """Loads with messages that are not done."""
        return list(self._frames.values())

    @property
    def ready(self) -> bool:
        """Whether something waits to be handed out."""
        return bool(self._queue)

    def runs_dry(self) -> bool:
        """Whether somebody waits for a message, and the broker must be told that it is so."""
        return self.awaited > 0 and not self._queue and self.credit.runs_dry()

    def next(self, now_ms: float) -> tuple[DeliveredFrame, int] | None:
        """Hands out the next message whose lease lasts; None when there is none."""
        while self._queue:
            frame = self._queue[0]
            state, index, count = frame.state, frame.cursor, len(frame.state)
            while index < count:
                if state[index] == WAITING:
                    if frame.earliest_ms > now_ms or frame.end_ms[index] > now_ms:
                        state[index] = HANDED
                        frame.waiting -= 1
                        frame.cursor = index + 1
                        if not frame.waiting:
                            self._queue.popleft()
                        self.stats.delivered += 1
                        return frame, index
                    self._drop(frame, np.array([index]))
                index += 1
            self._queue.popleft()
        return None

    def put_back(self, frame: DeliveredFrame, index: int) -> None:
        """Undo `next`: the message waits again, first of all, unless its lease was lost meanwhile."""
        if frame.state[index] != HANDED:
            return
        frame.state[index] = WAITING
        frame.waiting += 1
        frame.cursor = min(frame.cursor, index)
        if frame not in self._queue:
            self._queue.appendleft(frame)
        self.stats.delivered -= 1

    def next_batch(self, now_ms: float) -> tuple[DeliveredFrame, Indexes | None] | None:
        """Hands out all that waits of the oldest frame, as indexes; None for them: the whole frame."""
        while self._queue:
            frame = self._queue.popleft()
            if frame.earliest_ms <= now_ms:
                self._drop_ended(frame, now_ms)
            if not frame.waiting:
                continue
            whole = frame.waiting == len(frame)
            at = frame.where(WAITING)
            frame.mark(at, HANDED)
            self.stats.delivered += len(at)
            return frame, None if whole else at
        return None

    def _drop_ended(self, frame: DeliveredFrame, now_ms: float) -> None:
        waiting = frame.where(WAITING)
        ended = waiting[frame.ended(now_ms)[waiting]]
        if len(ended):
            self._drop(frame, ended)

    def _drop(self, frame: DeliveredFrame, at: Indexes) -> None:
        """The leases of waiting messages ended: they are never handed out."""
        self.stats.dropped += len(at)
        self.lose(frame, at)

    def lose(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Messages are not ours any more."""
        np.frombuffer(frame.lost, dtype=np.uint8)[at] = 1
        self.finish(frame, at)

    def finish(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Messages are done with; their credit goes back."""
        self.credit.give(frame, at)
        frame.mark(at, DONE)
        if not frame.open:
            self._frames.pop(id(frame), None)

    def take_back(self, frame: DeliveredFrame, at: Indexes) -> None:
        """The settles of these came to nothing: they are in hand again."""
        at = distinct(at)
        frame.mark(at[np.frombuffer(frame.state, dtype=np.uint8)[at] == SETTLING], HANDED)

    def settle_one(self, frame: DeliveredFrame, index: int) -> None:
        """`settle` for one message that is handed out, or whose settle goes again."""
        if frame.state[index] == HANDED:
            frame.state[index] = SETTLING

    def finish_one(self, frame: DeliveredFrame, index: int) -> None:
        """`finish` for one message that is being settled."""
        if frame.state[index] == SETTLING:
            self.credit.give_one(frame, index)
            frame.state[index] = DONE
            frame.open -= 1
            if not frame.open:
                self._frames.pop(id(frame), None)

    def sweep(self, now_ms: float) -> None:
        """Notices leases that ended: waiting messages are dropped; those handed out are lost, and their credit goes
        back, though a late ack of one is still sent."""
        for frame in list(self._frames.values()):
            if frame.earliest_ms > now_ms:
                continue
            self._drop_ended(frame, now_ms)
            ended = frame.ended(now_ms) & (np.frombuffer(frame.state, dtype=np.uint8) != DONE)
            at = np.flatnonzero(ended)
            if len(at):
                self.stats.lost += len(at)
                self._give_up(frame, at, now_ms)
                self.lose(frame, at)

    def lose_all(self) -> None:
        """Nothing in hand is ours any more: what waits is never handed out, what is handed out is lost."""
        for frame in self.frames:
            self._drop(frame, frame.where(WAITING))
            held = np.flatnonzero(np.frombuffer(frame.state, dtype=np.uint8) != DONE)
            self.stats.lost += len(held)
            self.lose(frame, held)

    def _give_up(self, frame: DeliveredFrame, at: Indexes, now_ms: float) -> None:
        """Remembers what was taken from a person's code because its lease may have ended: the earliest end that it can
        have is past, the true one perhaps not. Until then the token still counts as in hand, so that the broker does
        not send again what only we gave up."""
        columns = frame.columns
        longest_ms = float((columns.lease_until_ms[at] - columns.pushed_ms).max())
        self._forget_given_up(now_ms)
        self._given_up.append((now_ms + longest_ms, columns.ids.take(at), columns.birth[at], columns.version[at]))

    def _forget_given_up(self, now_ms: float) -> None:
        """Of those whose lease has surely ended by now nothing need be known."""
        while self._given_up and self._given_up[0][0] <= now_ms:
            self._given_up.popleft()

    def to_extend(self, now_ms: float, lease_ms: float) -> Iterator[tuple[DeliveredFrame, Indexes]]:
        """Messages that wait and are at half of their lease; asked again half a lease later."""
        for frame in list(self._frames.values()):
            if frame.waiting and frame.extend_at_ms <= now_ms:
                frame.extend_at_ms = now_ms + lease_ms / 4
                yield frame, frame.where(WAITING)

    def take_waiting(self) -> list[tuple[DeliveredFrame, Indexes]]:
        """All that waits, to be handed back: from now on it is being settled."""
        taken = []
        for frame in list(self._frames.values()):
            at = frame.where(WAITING)
            if len(at):
                frame.mark(at, SETTLING)
                taken.append((frame, at))
        self._queue.clear()
        return taken

    def tokens(self, now_ms: float, most: int = MAX_BATCH) -> tuple[Ragged, UInt64, Int64]:
        """(ids, births, versions) of all that is in hand, or was until its lease may have ended just now; at most
        `most`. What is not among them will be leased again: what waits goes without first, and is dropped here, so that
        nobody has it twice; then what was given up. A person's code has at most the credit, which always fits."""
        self._forget_given_up(now_ms)
        told = _Tokens(most)
        for state in (HANDED, SETTLING):
            for frame in self.frames:
                self._tell(told, frame, state)
        for _, ids, births, versions in self._given_up:
            told.add(ids, births, versions)
        for frame in self.frames:
            self._tell(told, frame, WAITING)
        return told.columns()

    def _tell(self, told: _Tokens, frame: DeliveredFrame, state: int) -> None:
        at = frame.where(state)
        columns = frame.columns
        room = told.add(columns.ids.take(at), columns.birth[at], columns.version[at])
        untold = at[room:]
        if len(untold):
            if state == WAITING:
                self._drop(frame, untold)
            else:
                self.stats.lost += len(untold)
                self.lose(frame, untold)


class _Tokens:
    """Columns of tokens, with room for so many."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._ids: list[Ragged] = [Ragged.of([])]
        self._births: list[UInt64] = [np.zeros(0, dtype=np.uint64)]
        self._versions: list[Int64] = [np.zeros(0, dtype=np.int64)]

    def add(self, ids: Ragged, births: UInt64, versions: Int64) -> int:
        """Adds what there is room for; answers how many that were."""
        taken = min(len(ids), self._room)
        self._room -= taken
        self._ids.append(ids[:taken])
        self._births.append(births[:taken])
        self._versions.append(versions[:taken])
        return taken

    def columns(self) -> tuple[Ragged, UInt64, Int64]:
        return Ragged.concat(self._ids), np.concatenate(self._births), np.concatenate(self._versions)
