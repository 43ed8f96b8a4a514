"""A consumer's messages in flight, and its credit. Each message waits, is handed out, is being settled, or is done.
Pure: the monotonic time is an argument.

The columns of a Deliver frame stay as they arrived, with a state byte per message. So a thousand deliveries are one
object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Bools, Indexes, Int64, Ragged, UInt64
from timeline.driver.times import shown
from timeline.errors import Invalid
from timeline.model import MAX_BATCH
from timeline.wire.frames import Deliver

HELD, RIDING, LEFT, GIVEN = 0, 1, 2, 3
"""Where the credit of a message is. HELD: with the message. RIDING: on its way with an unanswered settle. LEFT: the
same, but the message is done whatever the answer says. GIVEN: owed or given back."""

Ride: TypeAlias = list[tuple["DeliveredFrame", Indexes]]


class SettledPlaces:
    """A column of the messages in flight that settles are about, in order. A frame is None for settles that end
    nothing. `places[at]` are those at ascending `at`."""

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
    """The credit of one consumer: `messages` and `nbytes` in all."""

    def __init__(self, messages: int, nbytes: int) -> None:
        self.messages, self.bytes = messages, nbytes
        self.owed_messages = self.owed_bytes = 0
        """To be given back without a settle."""
        self.held_messages = self.held_bytes = 0
        """Not given back. A broker must not send more once this is all of the credit."""
        self._rides: dict[int, Ride] = {}
        self._returned = False
        self._resized = False

    def resize(self, messages: int) -> None:
        """Make it `messages` in all. If it grows, the broker is owed the difference. If it shrinks, the broker does not
        get back the credit of messages that end, until that makes up for the difference."""
        self.owed_messages += messages - self.messages
        self.messages, self._resized = messages, True

    @property
    def _untold(self) -> bool:
        """Whether to tell the broker of another size. It is not told while more credit is out than that."""
        return self._resized and self.owed_messages >= 0

    def take_room(self) -> int:
        """Take the size to send it now. 0: there is nothing to tell."""
        if not self._untold:
            return 0
        self._resized = False
        return self.messages

    def arrive(self, frame: DeliveredFrame) -> None:
        """Count the credit that a new frame holds."""
        self._returned = False
        self.held_messages += len(frame)
        self.held_bytes += int(frame.sizes.sum())

    @property
    def owed(self) -> bool:
        """Whether credit, or another size, is to be sent without a settle."""
        return self.owed_messages > 0 or self.owed_bytes > 0 or self._untold

    def runs_dry(self) -> bool:
        """Return whether credit went back since the last frame or call, but little is free. The broker may then wait
        for more before it leases."""
        returned, self._returned = self._returned, False
        return returned and (4 * self.held_messages > 3 * self.messages or 4 * self.held_bytes > 3 * self.bytes)

    def take_owed(self) -> tuple[int, int]:
        """Take the owed credit to send it now: (messages, bytes)."""
        self._returned = True
        messages, nbytes = max(0, self.owed_messages), max(0, self.owed_bytes)
        self.owed_messages -= messages
        self.owed_bytes -= nbytes
        return messages, nbytes

    def give(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Owe the credit of messages that are done, once. Riding credit is owed if its settle turns out not to
        count."""
        credit = np.frombuffer(frame.credit, dtype=np.uint8)
        states = credit[at]
        if (states == GIVEN).all():
            return
        credit[at[states == RIDING]] = LEFT
        self._owe(frame, distinct(at[states == HELD]))

    def give_one(self, frame: DeliveredFrame, index: int) -> None:
        """Do `give` for one message."""
        state = frame.credit[index]
        if state == RIDING:
            frame.credit[index] = LEFT
        elif state == HELD:
            self._owe(frame, np.array([index]))

    def board(self, request: int, places: SettledPlaces) -> tuple[int, int]:
        """Return the credit that rides with Settle `request`: (messages, bytes) that no earlier settle took along.
        Nothing rides while a message larger than all credit is made up for."""
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
        """End the ride with Settle `request`, which was answered or cannot be sent. If it `counts`, its credit is given
        back. Otherwise messages hold it again, and it is owed for those that are done."""
        self._returned |= counts
        for frame, at in self._rides.pop(request, ()):
            if counts and len(at) == 1:  # a fifth of the cost of the arrays below
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
        """Return the credit for a new stream, without the held one. Riding credit of the last stream rides again with
        the next settle. After a message larger than all credit, the owed credit is negative until that comes back. The
        stream's first frame tells the size."""
        self._resized = False
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
    """Return each index once. A caller may name a message twice."""
    return at if len(at) < 2 or bool((at[1:] > at[:-1]).all()) else np.unique(at)


def check_credit(credit: Any, name: str, most: int) -> int:
    """Return `credit` if it is a whole number from 1 to `most`. Raise Invalid otherwise."""
    if isinstance(credit, bool) or not isinstance(credit, int) or not 1 <= credit <= most:
        raise Invalid(f"{name} must be a whole number from 1 to {most}, not {shown(credit)}")
    return credit


WAITING, HANDED, SETTLING, DONE = 0, 1, 2, 3
"""States: in the buffer; with the user's code; its settle is on its way; settled or lost."""


@dataclass(slots=True)
class Stats:
    """Counters of a consumer since it was made.

    `delivered`: deliveries handed out. `dropped`: deliveries whose lease ended before that. `damaged`: messages that
    arrived with a wrong checksum, and were buried. `lost`: messages handed out whose lease ended before a settle.
    `settle_errors`: unawaited settles, as of `ack_soon`, that failed. `released_unseen`: messages returned from the
    buffer. `reconnects`: streams that ended before the consumer did.
    """

    delivered: int = 0
    dropped: int = 0
    damaged: int = 0
    lost: int = 0
    settle_errors: int = 0
    released_unseen: int = 0
    reconnects: int = 0


class DeliveredFrame:
    """The messages of one Deliver frame. `end_ms`: when each lease ends, monotonic. `until_ms`: the same on the
    broker's clock. `sizes`: the bytes of credit that each takes."""

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
        """Where the credit of each message is: HELD, RIDING, LEFT or GIVEN."""
        self.lost = bytearray(count)
        """1 if the lease is known to have ended, or another consumer is known to have the message."""
        self.cursor = 0
        self.waiting = self.open = count
        self.earliest_ms = float(end_ms.min()) if count else 0.0
        self.extend_at_ms = float("inf")
        self.soon: list[int] = []
        """Indexes of `ack_soon` that are not sent yet."""

    def __len__(self) -> int:
        return len(self.state)

    def where(self, state: int) -> Indexes:
        """Return the indexes of messages in `state`."""
        return np.flatnonzero(np.frombuffer(self.state, dtype=np.uint8) == state)

    def ended(self, now_ms: float) -> Bools:
        """Return which leases have ended by monotonic `now_ms`."""
        ended: Bools = self.end_ms <= now_ms
        return ended

    def mark(self, at: Indexes, state: int) -> None:
        """Set the state of messages, and count. Only `InFlight.put_back` sets WAITING."""
        at = distinct(at)
        view = np.frombuffer(self.state, dtype=np.uint8)
        before = view[at]
        self.waiting -= int((before == WAITING).sum())
        done = int((before == DONE).sum())
        self.open += done - len(before) if state == DONE else done
        view[at] = state

    def extended(self, at: Indexes, until_ms: Int64, end_ms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Set the new ends of the leases of messages at `at`."""
        self.until_ms[at] = until_ms
        self.end_ms[at] = end_ms
        self.earliest_ms = float(self.end_ms.min())


class InFlight:
    """All frames in flight in order of arrival, and the credit."""

    def __init__(self, credit_messages: int, credit_bytes: int) -> None:
        self.credit = CreditLedger(credit_messages, credit_bytes)
        self.stats = Stats()
        self._frames: dict[int, DeliveredFrame] = {}
        self._queue: deque[DeliveredFrame] = deque()
        self._given_up: deque[tuple[float, Ragged, UInt64, Int64]] = deque()
        self.awaited = 0
        """The number of callers that wait for a message."""

    def arrive(self, frame: DeliveredFrame) -> None:
        """Take a frame that came."""
        self._frames[id(frame)] = frame
        self.credit.arrive(frame)
        if frame.waiting:
            self._queue.append(frame)

    @property
    def frames(self) -> list[DeliveredFrame]:
        """Frames with messages that are not done."""
        return list(self._frames.values())

    @property
    def waiting(self) -> int:
        """The number of messages that wait to be handed out."""
        return sum(frame.waiting for frame in self._queue)

    @property
    def ready(self) -> bool:
        """Whether something waits to be handed out."""
        return bool(self._queue)

    def runs_dry(self) -> bool:
        """Return whether a caller waits for a message, and the broker must learn of it."""
        return self.awaited > 0 and not self._queue and self.credit.runs_dry()

    def next(self, now_ms: float) -> tuple[DeliveredFrame, int] | None:
        """Hand out the next message whose lease lasts. None: there is none."""
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
        """Undo `next`: the message waits again, as the first one, unless its lease was lost."""
        if frame.state[index] != HANDED:
            return
        frame.state[index] = WAITING
        frame.waiting += 1
        frame.cursor = min(frame.cursor, index)
        if frame not in self._queue:
            self._queue.appendleft(frame)
        self.stats.delivered -= 1

    def next_batch(self, now_ms: float) -> tuple[DeliveredFrame, Indexes | None] | None:
        """Hand out all waiting messages of the oldest frame, as indexes. None for these: the whole frame."""
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
        """Drop waiting messages whose leases ended."""
        self.stats.dropped += len(at)
        self.lose(frame, at)

    def lose(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Mark messages as lost."""
        np.frombuffer(frame.lost, dtype=np.uint8)[at] = 1
        self.finish(frame, at)

    def finish(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Mark messages as done, and give their credit back."""
        self.credit.give(frame, at)
        frame.mark(at, DONE)
        if not frame.open:
            self._frames.pop(id(frame), None)

    def take_back(self, frame: DeliveredFrame, at: Indexes) -> None:
        """Take messages back whose settles had no effect."""
        at = distinct(at)
        frame.mark(at[np.frombuffer(frame.state, dtype=np.uint8)[at] == SETTLING], HANDED)

    def settle_one(self, frame: DeliveredFrame, index: int) -> None:
        """Mark one message as being settled, if it is handed out."""
        if frame.state[index] == HANDED:
            frame.state[index] = SETTLING

    def finish_one(self, frame: DeliveredFrame, index: int) -> None:
        """Do `finish` for one message that is being settled."""
        if frame.state[index] == SETTLING:
            self.credit.give_one(frame, index)
            frame.state[index] = DONE
            frame.open -= 1
            if not frame.open:
                self._frames.pop(id(frame), None)

    def sweep(self, now_ms: float) -> None:
        """Find leases that ended. Waiting messages are dropped. Messages handed out are lost and their credit goes
        back, but a late ack is still sent."""
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
        """Drop all waiting messages, and mark those handed out as lost."""
        for frame in self.frames:
            self._drop(frame, frame.where(WAITING))
            held = np.flatnonzero(np.frombuffer(frame.state, dtype=np.uint8) != DONE)
            self.stats.lost += len(held)
            self.lose(frame, held)

    def _give_up(self, frame: DeliveredFrame, at: Indexes, now_ms: float) -> None:
        """Remember messages that were given up because their lease may have ended: its earliest possible end is past,
        perhaps not the true one. Until then their tokens count as in flight, or the broker would send them again."""
        columns = frame.columns
        longest_ms = float((columns.lease_until_ms[at] - columns.pushed_ms).max())
        self._forget_given_up(now_ms)
        self._given_up.append((now_ms + longest_ms, columns.ids.take(at), columns.birth[at], columns.version[at]))

    def _forget_given_up(self, now_ms: float) -> None:
        """Forget messages whose lease has certainly ended."""
        while self._given_up and self._given_up[0][0] <= now_ms:
            self._given_up.popleft()

    def to_extend(self, now_ms: float, lease_ms: float) -> Iterator[tuple[DeliveredFrame, Indexes]]:
        """Yield waiting messages at half of their lease. They come again half a lease later."""
        for frame in list(self._frames.values()):
            if frame.waiting and frame.extend_at_ms <= now_ms:
                frame.extend_at_ms = now_ms + lease_ms / 4
                yield frame, frame.where(WAITING)

    def take_waiting(self) -> list[tuple[DeliveredFrame, Indexes]]:
        """Take all waiting messages to return them. From now on they are being settled."""
        taken = []
        for frame in list(self._frames.values()):
            at = frame.where(WAITING)
            if len(at):
                frame.mark(at, SETTLING)
                taken.append((frame, at))
        self._queue.clear()
        return taken

    def tokens(self, now_ms: float, most: int = MAX_BATCH) -> tuple[Ragged, UInt64, Int64]:
        """Return (ids, births, versions) of at most `most` messages that are in flight, or were given up just now.

        The broker leases the others again. Waiting messages are left out first, and are dropped here, so that none is
        handed out twice; then those given up. Messages with the user's code always fit: they are at most the credit.
        """
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
    """Columns of tokens, with room for `room` of them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._ids: list[Ragged] = [Ragged.of([])]
        self._births: list[UInt64] = [np.zeros(0, dtype=np.uint64)]
        self._versions: list[Int64] = [np.zeros(0, dtype=np.int64)]

    def add(self, ids: Ragged, births: UInt64, versions: Int64) -> int:
        """Add as many tokens as there is room for. Return how many."""
        taken = min(len(ids), self._room)
        self._room -= taken
        self._ids.append(ids[:taken])
        self._births.append(births[:taken])
        self._versions.append(versions[:taken])
        return taken

    def columns(self) -> tuple[Ragged, UInt64, Int64]:
        return Ragged.concat(self._ids), np.concatenate(self._births), np.concatenate(self._versions)
