"""What a consumer has in hand: leases that end, credit that goes back, tokens that are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from timeline.columns import Ragged
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import (
    DONE,
    GIVEN,
    HANDED,
    SETTLING,
    WAITING,
    DeliveredFrame,
    InFlight,
    SettledPlaces,
)
from timeline.wire.frames import Deliver


def _frame(count: int, ends_ms: float = 1_000.0, name: str = "m", size: int = 10) -> DeliveredFrame:
    frame = Deliver(
        leased_ms=1,
        pushed_ms=1,
        ids=Ragged.of([f"{name}{n}".encode() for n in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        version=np.full(count, 2, dtype=np.int64),
        due_ms=np.ones(count, dtype=np.int64),
        scheduled_ms=np.ones(count, dtype=np.int64),
        lease_until_ms=np.full(count, 1_000, dtype=np.int64),
        deliveries=np.ones(count, dtype=np.uint32),
        payload_sum=np.zeros(count, dtype=np.uint64),
        payloads=Ragged.of([b"x" * size] * count),
    )
    return DeliveredFrame(frame, np.full(count, ends_ms))


def test_messages_are_handed_out_once_and_in_order() -> None:
    in_flight = InFlight(10, 1_000)
    first, second = _frame(3), _frame(2, name="n")
    in_flight.arrive(first)
    in_flight.arrive(second)
    taken = [in_flight.next(0.0) for _ in range(3)]
    assert [(frame, index) for frame, index in filter(None, taken)] == [(first, 0), (first, 1), (first, 2)]
    batch = in_flight.next_batch(0.0)
    assert batch is not None and batch[0] is second and batch[1] is None
    assert in_flight.next(0.0) is None and in_flight.next_batch(0.0) is None


def test_a_delivery_whose_lease_has_ended_is_never_handed_out() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(3)
    frame.end_ms[1] = 50.0
    frame.earliest_ms = 50.0
    in_flight.arrive(frame)
    taken = [in_flight.next(60.0), in_flight.next(60.0), in_flight.next(60.0)]
    assert [index for _, index in filter(None, taken)] == [0, 2]
    assert in_flight.stats.dropped == 1 and in_flight.credit.take_owed() == (1, 10)
    in_flight.arrive(_frame(4, ends_ms=50.0))
    assert in_flight.next_batch(50.0) is None and in_flight.stats.dropped == 5


def test_part_of_a_load_is_a_batch_too() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(4)
    frame.end_ms[2] = frame.earliest_ms = 50.0
    in_flight.arrive(frame)
    in_flight.next(0.0)
    taken = in_flight.next_batch(60.0)
    assert taken is not None and taken[1] is not None and taken[1].tolist() == [1, 3]


def _settle(in_flight: InFlight, request: int, frame: DeliveredFrame, *at: int) -> tuple[int, int]:
    """Sends a settle; answers the credit that rides with it."""
    where = np.array(at)
    frame.mark(where, SETTLING)
    return in_flight.credit.board(request, SettledPlaces([(frame, where)]))


def test_credit_rides_once_with_the_settle_and_is_given_back_when_that_counts() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(4)
    in_flight.arrive(frame)
    assert in_flight.credit.room() == (6, 960)
    in_flight.next_batch(0.0)
    assert _settle(in_flight, 1, frame, 0, 1) == (2, 20)
    in_flight.settle_one(frame, 2)
    assert in_flight.credit.board(2, SettledPlaces([(None, np.array([3])), (frame, np.array([2]))])) == (1, 10)
    assert _settle(in_flight, 3, frame, 0, 1) == (0, 0)
    in_flight.credit.land(1, counts=True)
    in_flight.credit.land(3, counts=True)
    in_flight.finish(frame, np.array([0, 1]))
    assert not in_flight.credit.owed and in_flight.credit.held_messages == 2
    # A new stream: what is not answered yet is in hand until it is sent again.
    assert in_flight.credit.room() == (8, 980) and _settle(in_flight, 4, frame, 2) == (1, 10)
    in_flight.credit.land(4, counts=True)
    in_flight.finish_one(frame, 2)
    assert in_flight.credit.room() == (9, 990) and not in_flight.credit.owed
    assert in_flight.tokens(0.0)[0].tolist() == [b"m3"]
    frame.mark(np.array([3]), SETTLING)
    in_flight.finish(frame, np.array([3]))
    assert in_flight.credit.take_owed() == (1, 10)
    assert in_flight.frames == [] and in_flight.credit.room() == (10, 1_000)


@pytest.mark.parametrize("first", ["answers", "credit"])
def test_where_one_settle_came_to_nothing_the_credit_of_the_others_is_owed_by_itself(first: str) -> None:
    in_flight = InFlight(4, 40)
    frame = _frame(4)
    in_flight.arrive(frame)
    in_flight.next_batch(0.0)
    assert _settle(in_flight, 1, frame, 0, 1, 2) == (3, 30)
    if first == "credit":
        in_flight.credit.land(1, counts=False)
    in_flight.finish(frame, np.array([0]))
    in_flight.finish_one(frame, 1)
    in_flight.take_back(frame, np.array([2, 3]))
    if first == "answers":
        assert not in_flight.credit.owed
        in_flight.credit.land(1, counts=False)
    assert frame.state == bytearray([DONE, DONE, HANDED, HANDED])
    assert in_flight.credit.take_owed() == (2, 20) and in_flight.credit.held_messages == 2
    assert _settle(in_flight, 2, frame, 0, 1, 2) == (1, 10)
    assert in_flight.credit.room() == (2, 20) and _settle(in_flight, 3, frame, 2, 3) == (2, 20)


def test_what_was_lost_while_its_credit_rode_gives_it_back_once() -> None:
    in_flight = InFlight(4, 40)
    frame = _frame(2)
    in_flight.arrive(frame)
    in_flight.next_batch(0.0)
    assert _settle(in_flight, 1, frame, 0) == _settle(in_flight, 2, frame, 1) == (1, 10)
    in_flight.sweep(1_000.0)
    assert in_flight.frames == [] and not in_flight.credit.owed
    in_flight.credit.land(1, counts=True)
    assert not in_flight.credit.owed
    in_flight.credit.land(2, counts=False)
    assert in_flight.credit.take_owed() == (1, 10) and in_flight.credit.room() == (4, 40)


def test_a_message_larger_than_all_credit_does_not_add_to_it_on_a_new_stream() -> None:
    in_flight = InFlight(4, 15)
    frame = _frame(2)
    in_flight.arrive(frame)
    in_flight.next_batch(0.0)
    assert in_flight.credit.room() == (2, 0)  # 20 bytes are in hand
    assert _settle(in_flight, 1, frame, 0) == (0, 0)  # what is made up for is not known before the answer
    in_flight.finish(frame, np.array([0]))
    assert in_flight.credit.take_owed() == (1, 5)
    assert _settle(in_flight, 2, frame, 1) == (1, 10)


def test_a_message_named_twice_gives_its_credit_back_once() -> None:
    in_flight = InFlight(4, 40)
    frame = _frame(3)
    in_flight.arrive(frame)
    in_flight.next_batch(0.0)
    assert _settle(in_flight, 1, frame, 0, 0, 1) == (2, 20)
    in_flight.credit.land(1, counts=True)
    in_flight.finish(frame, np.array([0, 0]))
    in_flight.finish(frame, np.array([2, 2]))
    assert frame.open == 1 and in_flight.credit.take_owed() == (1, 10)


def test_part_of_a_column_of_places() -> None:
    one, other = _frame(3), _frame(2, name="n")
    places = SettledPlaces([(one, np.array([2, 0])), (None, np.array([1])), (other, np.array([1, 0]))])
    told = [(frame, at.tolist()) for frame, at in places[np.array([1, 2, 4])].parts]
    assert told == [(one, [0]), (None, [1]), (other, [0])]
    assert [(frame, at.tolist()) for frame, at in places[np.array([3])].parts] == [(other, [1])]


def test_tokens_that_a_hello_has_no_room_for_are_lost_here_and_what_waits_goes_first() -> None:
    in_flight = InFlight(10, 1_000)
    given_up, held, waits = _frame(1, ends_ms=50.0, name="g"), _frame(3, name="h"), _frame(3, name="w")
    for frame in (given_up, held, waits):
        in_flight.arrive(frame)
    in_flight.next(0.0)
    in_flight.sweep(60.0)
    in_flight.next(0.0), in_flight.next(0.0), in_flight.next(0.0)
    held.mark(np.array([1]), SETTLING)
    assert in_flight.tokens(60.0)[0].tolist() == [b"h0", b"h2", b"h1", b"g0", b"w0", b"w1", b"w2"]
    ids, births, versions = in_flight.tokens(60.0, most=5)
    assert ids.tolist() == [b"h0", b"h2", b"h1", b"g0", b"w0"] and len(births) == len(versions) == 5
    assert in_flight.stats.dropped == 2 and in_flight.next(60.0) == (waits, 0) and in_flight.next(60.0) is None
    assert in_flight.tokens(60.0, most=1)[0].tolist() == [b"h0"]
    assert list(held.lost) == [0, 1, 1] and list(waits.lost) == [1, 1, 1]


def test_what_was_handed_out_and_never_settled_gives_its_credit_back_when_it_is_lost() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(2)
    in_flight.arrive(frame)
    in_flight.next(0.0)
    in_flight.sweep(999.0)
    assert in_flight.credit.take_owed() == (0, 0)
    in_flight.sweep(1_000.0)
    assert in_flight.credit.take_owed() == (2, 20)
    assert (in_flight.stats.lost, in_flight.stats.dropped, list(frame.lost)) == (1, 1, [1, 1])
    assert in_flight.frames == []


def test_what_waits_is_extended_at_half_of_its_lease() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(3)
    frame.extend_at_ms = 500.0
    in_flight.arrive(frame)
    in_flight.next(0.0)
    assert list(in_flight.to_extend(499.0, 1_000.0)) == []
    ((asked, at),) = in_flight.to_extend(500.0, 1_000.0)
    assert asked is frame and at.tolist() == [1, 2]
    frame.extended(at, np.array([2_000, 2_000]), np.array([2_000.0, 2_000.0]))
    in_flight.sweep(1_500.0)
    assert frame.state == bytearray([DONE, WAITING, WAITING]) and in_flight.next(1_500.0) == (frame, 1)


class HandMachine(RuleBasedStateMachine):
    """Whatever happens, credit is neither lost nor made: what a broker was given back, what is owed and what messages
    hold is always all that was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = InFlight(1_000, 1_000_000)
        self.frames: list[DeliveredFrame] = []
        self.now_ms = 0.0
        self.sent = self.returned = 0
        self.request = 0
        self.outstanding: dict[int, tuple[SettledPlaces, int]] = {}

    @rule(count=st.integers(1, 5), lease=st.integers(1, 50), size=st.integers(0, 9))
    def arrive(self, count: int, lease: int, size: int) -> None:
        frame = _frame(count, self.now_ms + lease, f"l{len(self.frames)}-", size)
        self.frames.append(frame)
        self.in_flight.arrive(frame)
        self.sent += count

    @rule(by=st.integers(0, 30))
    def wait(self, by: int) -> None:
        self.now_ms += by

    @rule()
    def take(self) -> None:
        taken = self.in_flight.next(self.now_ms)
        if taken is not None:
            frame, index = taken
            assert frame.end_ms[index] > self.now_ms and frame.state[index] == HANDED

    @rule()
    def take_batch(self) -> None:
        taken = self.in_flight.next_batch(self.now_ms)
        if taken is not None:
            frame, at = taken
            where = np.arange(len(frame)) if at is None else at
            assert len(where) and (frame.end_ms[where] > self.now_ms).all()

    @rule()
    def sweep(self) -> None:
        self.in_flight.sweep(self.now_ms)

    @rule(pick=st.randoms(use_true_random=False))
    def settle(self, pick: object) -> None:
        for frame in self.frames:
            at = frame.where(HANDED)[: pick.randrange(3)]  # type: ignore[attr-defined]
            frame.mark(np.concatenate([at, at]), SETTLING)

    @rule(pick=st.randoms(use_true_random=False))
    def take_back(self, pick: object) -> None:
        for frame in self.frames:
            at = frame.where(SETTLING)[: pick.randrange(3)]  # type: ignore[attr-defined]
            self.in_flight.take_back(frame, np.concatenate([at, at]))

    @rule(pick=st.randoms(use_true_random=False))
    def send(self, pick: object) -> None:
        parts = [(frame, frame.where(SETTLING)[: pick.randrange(3)]) for frame in self.frames]  # type: ignore[attr-defined]
        self.request += 1
        places = SettledPlaces(parts)
        self.outstanding[self.request] = places, self.in_flight.credit.board(self.request, places)[0]

    @rule(taken=st.booleans(), credit_first=st.booleans())
    def answered(self, taken: bool, credit_first: bool) -> None:
        """All was taken, or every other one."""
        if not self.outstanding:
            return
        request, (places, rode) = self.outstanding.popitem()
        self.returned += rode if taken else 0
        if credit_first:
            self.in_flight.credit.land(request, taken)
        for frame, at in places.parts:
            assert frame is not None
            self.in_flight.finish(frame, at[:: 1 if taken else 2])
            self.in_flight.take_back(frame, at)
        if not credit_first:
            self.in_flight.credit.land(request, taken)

    @rule()
    def stream_ends(self) -> None:
        self.outstanding.clear()
        room = self.in_flight.credit.room()
        free = self.in_flight.credit.messages - self.in_flight.credit.held_messages
        assert room[0] == max(0, free) and not self.in_flight.credit.owed
        self.returned = self.sent + room[0] - 1_000

    @rule(size=st.integers(1, 2_000))
    def resize(self, size: int) -> None:
        self.in_flight.credit.resize(size)

    @rule()
    def send_room(self) -> None:
        """The broker never has more credit out than the room that it is told of."""
        if room := self.in_flight.credit.take_room():
            assert room == self.in_flight.credit.messages
            assert 1_000 + self.returned - self.sent + self.in_flight.credit.held_messages <= room

    @rule()
    def hand_back(self) -> None:
        self.in_flight.take_waiting()

    @rule()
    def send_credit(self) -> None:
        messages, nbytes = self.in_flight.credit.take_owed()
        assert messages >= 0 and nbytes >= 0
        self.returned += messages

    @invariant()
    def counts_fit(self) -> None:
        credit = self.in_flight.credit
        held = [np.frombuffer(frame.credit, np.uint8) != GIVEN for frame in self.frames]
        assert credit.held_messages == sum(int(each.sum()) for each in held)
        assert credit.held_bytes == sum(
            int(frame.sizes[each].sum()) for frame, each in zip(self.frames, held, strict=True)
        )
        riding = sum(rode for _, rode in self.outstanding.values())
        assert self.sent + credit.messages == 1_000 + credit.held_messages + credit.owed_messages + self.returned
        assert riding <= credit.held_messages
        for frame in self.frames:
            assert frame.waiting == frame.state.count(WAITING)
            assert frame.open == len(frame) - frame.state.count(DONE)
        assert {id(frame) for frame in self.in_flight.frames} == {id(frame) for frame in self.frames if frame.open}


HandMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestHand = pytest.mark.slow(HandMachine.TestCase)


def test_a_lease_is_placed_by_the_earliest_moment_that_it_can_mean() -> None:
    clock = BrokerClock()
    # Broker's time 10,000 is monotonic 500. A question takes 2 ms there and 3 ms back.
    clock.sent(498.0, 10_000, 503.0)
    assert clock.monotonic_ms(10_100) <= 600.0
    assert clock.monotonic_ms(10_100) >= 597.0
    clock.sent(1_499.9, 11_000, 1_500.1)
    assert 598.8 <= clock.monotonic_ms(10_100) <= 600.0


def test_a_frame_that_lay_in_a_socket_does_not_make_a_lease_longer() -> None:
    clock = BrokerClock()
    clock.sent(499.0, 10_000, 501.0)
    before = clock.monotonic_ms(10_100)
    clock.arrived(60_000.0, 10_050)
    assert clock.monotonic_ms(10_100) == before


def test_a_step_of_the_brokers_clock_is_followed() -> None:
    clock = BrokerClock()
    clock.sent(499.0, 10_000, 501.0)
    clock.sent(1_499.0, 3_611_000, 1_501.0)  # an hour forward
    assert -2.0 <= clock.monotonic_ms(3_611_000) - 1_500.0 <= 0.0
    clock.sent(2_499.0, 12_000, 2_501.0)  # and back
    assert -2.0 <= clock.monotonic_ms(12_000) - 2_500.0 <= 0.0


def test_before_anything_is_known_no_lease_lasts() -> None:
    assert BrokerClock().monotonic_ms(10**15) == float("-inf")


def test_what_was_given_up_counts_as_in_hand_until_its_lease_has_surely_ended() -> None:
    in_flight = InFlight(10, 1_000)
    frame = _frame(2)
    longest_ms = float((frame.columns.lease_until_ms - frame.columns.pushed_ms).max())
    frame.end_ms[:] = frame.earliest_ms = 50.0
    in_flight.arrive(frame)
    in_flight.next(0.0)
    in_flight.sweep(60.0)
    assert in_flight.frames == [] and in_flight.stats.lost == 1 and in_flight.stats.dropped == 1
    assert in_flight.tokens(60.0)[0].tolist() == [b"m0"]
    assert in_flight.tokens(60.0 + longest_ms)[0].tolist() == []


def test_what_was_given_up_is_forgotten_though_no_stream_ends() -> None:
    in_flight = InFlight(10, 1_000)
    for n in range(100):
        now_ms = 1_000.0 * n
        in_flight.arrive(_frame(1, ends_ms=now_ms + 500.0, name=f"m{n}-"))
        assert in_flight.next(now_ms) is not None
        in_flight.sweep(now_ms + 500.0)
    assert in_flight.stats.lost == 100 and len(in_flight._given_up) <= 2
