"""The credit of what is in hand: held by a message, riding with the settle that ends it, or given back. Pure.

A message's credit rides once, with the first settle of it that is sent, and whether it arrived is known with the answer
(`wire.frames`). What has no settle to ride with is owed, and goes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from timeline.columns import Indexes, Int64
from timeline.errors import Invalid

if TYPE_CHECKING:
    from timeline.driver.consume.in_flight import DeliveredFrame

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
