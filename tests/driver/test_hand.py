"""What a consumer has in hand: leases that end, credit that goes back, tokens that are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from timeline.columns import Ragged
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.credit import GIVEN, Places
from timeline.driver.consume.in_flight import DONE, HANDED, SETTLING, WAITING, Hand, Load
from timeline.wire.frames import Deliver


def _load(count: int, ends_ms: float = 1_000.0, name: str = "m", size: int = 10) -> Load:
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
    return Load(frame, np.full(count, ends_ms))


def test_messages_are_handed_out_once_and_in_order() -> None:
    hand = Hand(10, 1_000)
    first, second = _load(3), _load(2, name="n")
    hand.arrive(first)
    hand.arrive(second)
    taken = [hand.next(0.0) for _ in range(3)]
    assert [(load, index) for load, index in filter(None, taken)] == [(first, 0), (first, 1), (first, 2)]
    batch = hand.next_batch(0.0)
    assert batch is not None and batch[0] is second and batch[1] is None
    assert hand.next(0.0) is None and hand.next_batch(0.0) is None


def test_a_delivery_whose_lease_has_ended_is_never_handed_out() -> None:
    hand = Hand(10, 1_000)
    load = _load(3)
    load.end_ms[1] = 50.0
    load.earliest_ms = 50.0
    hand.arrive(load)
    taken = [hand.next(60.0), hand.next(60.0), hand.next(60.0)]
    assert [index for _, index in filter(None, taken)] == [0, 2]
    assert hand.stats.dropped == 1 and hand.credit.take_owed() == (1, 10)
    hand.arrive(_load(4, ends_ms=50.0))
    assert hand.next_batch(50.0) is None and hand.stats.dropped == 5


def test_part_of_a_load_is_a_batch_too() -> None:
    hand = Hand(10, 1_000)
    load = _load(4)
    load.end_ms[2] = load.earliest_ms = 50.0
    hand.arrive(load)
    hand.next(0.0)
    taken = hand.next_batch(60.0)
    assert taken is not None and taken[1] is not None and taken[1].tolist() == [1, 3]


def _settle(hand: Hand, request: int, load: Load, *at: int) -> tuple[int, int]:
    """Sends a settle; answers the credit that rides with it."""
    where = np.array(at)
    hand.settle(load, where)
    return hand.credit.board(request, Places([(load, where)]))


def test_credit_rides_once_with_the_settle_and_is_given_back_when_that_counts() -> None:
    hand = Hand(10, 1_000)
    load = _load(4)
    hand.arrive(load)
    assert hand.credit.room() == (6, 960)
    hand.next_batch(0.0)
    assert _settle(hand, 1, load, 0, 1) == (2, 20)
    hand.settle_one(load, 2)
    assert hand.credit.board(2, Places([(None, np.array([3])), (load, np.array([2]))])) == (1, 10)
    assert _settle(hand, 3, load, 0, 1) == (0, 0)
    hand.credit.land(1, counts=True)
    hand.credit.land(3, counts=True)
    hand.finish(load, np.array([0, 1]))
    assert not hand.credit.owed and hand.credit.held_messages == 2
    # A new stream: what is not answered yet is in hand until it is sent again.
    assert hand.credit.room() == (8, 980) and _settle(hand, 4, load, 2) == (1, 10)
    hand.credit.land(4, counts=True)
    hand.finish_one(load, 2)
    assert hand.credit.room() == (9, 990) and not hand.credit.owed
    assert hand.tokens(0.0)[0].tolist() == [b"m3"]
    hand.settle(load, np.array([3]))
    hand.finish(load, np.array([3]))
    assert hand.credit.take_owed() == (1, 10)
    assert hand.loads == [] and hand.credit.room() == (10, 1_000)


@pytest.mark.parametrize("first", ["answers", "credit"])
def test_where_one_settle_came_to_nothing_the_credit_of_the_others_is_owed_by_itself(first: str) -> None:
    hand = Hand(4, 40)
    load = _load(4)
    hand.arrive(load)
    hand.next_batch(0.0)
    assert _settle(hand, 1, load, 0, 1, 2) == (3, 30)
    if first == "credit":
        hand.credit.land(1, counts=False)
    hand.finish(load, np.array([0]))
    hand.finish_one(load, 1)
    hand.take_back(load, np.array([2, 3]))
    if first == "answers":
        assert not hand.credit.owed
        hand.credit.land(1, counts=False)
    assert load.state == bytearray([DONE, DONE, HANDED, HANDED])
    assert hand.credit.take_owed() == (2, 20) and hand.credit.held_messages == 2
    assert _settle(hand, 2, load, 0, 1, 2) == (1, 10)
    assert hand.credit.room() == (2, 20) and _settle(hand, 3, load, 2, 3) == (2, 20)


def test_what_was_lost_while_its_credit_rode_gives_it_back_once() -> None:
    hand = Hand(4, 40)
    load = _load(2)
    hand.arrive(load)
    hand.next_batch(0.0)
    assert _settle(hand, 1, load, 0) == _settle(hand, 2, load, 1) == (1, 10)
    hand.sweep(1_000.0)
    assert hand.loads == [] and not hand.credit.owed
    hand.credit.land(1, counts=True)
    assert not hand.credit.owed
    hand.credit.land(2, counts=False)
    assert hand.credit.take_owed() == (1, 10) and hand.credit.room() == (4, 40)


def test_a_message_larger_than_all_credit_does_not_add_to_it_on_a_new_stream() -> None:
    hand = Hand(4, 15)
    load = _load(2)
    hand.arrive(load)
    hand.next_batch(0.0)
    assert hand.credit.room() == (2, 0)  # 20 bytes are in hand
    assert _settle(hand, 1, load, 0) == (0, 0)  # what is made up for is not known before the answer
    hand.finish(load, np.array([0]))
    assert hand.credit.take_owed() == (1, 5)
    assert _settle(hand, 2, load, 1) == (1, 10)


def test_a_message_named_twice_gives_its_credit_back_once() -> None:
    hand = Hand(4, 40)
    load = _load(3)
    hand.arrive(load)
    hand.next_batch(0.0)
    assert _settle(hand, 1, load, 0, 0, 1) == (2, 20)
    hand.credit.land(1, counts=True)
    hand.finish(load, np.array([0, 0]))
    hand.finish(load, np.array([2, 2]))
    assert load.open == 1 and hand.credit.take_owed() == (1, 10)


def test_part_of_a_column_of_places() -> None:
    one, other = _load(3), _load(2, name="n")
    places = Places([(one, np.array([2, 0])), (None, np.array([1])), (other, np.array([1, 0]))])
    told = [(load, at.tolist()) for load, at in places[np.array([1, 2, 4])].parts]
    assert told == [(one, [0]), (None, [1]), (other, [0])]
    assert [(load, at.tolist()) for load, at in places[np.array([3])].parts] == [(other, [1])]


def test_tokens_that_a_hello_has_no_room_for_are_lost_here_and_what_waits_goes_first() -> None:
    hand = Hand(10, 1_000)
    given_up, held, waits = _load(1, ends_ms=50.0, name="g"), _load(3, name="h"), _load(3, name="w")
    for load in (given_up, held, waits):
        hand.arrive(load)
    hand.next(0.0)
    hand.sweep(60.0)
    hand.next(0.0), hand.next(0.0), hand.next(0.0)
    hand.settle(held, np.array([1]))
    assert hand.tokens(60.0)[0].tolist() == [b"h0", b"h2", b"h1", b"g0", b"w0", b"w1", b"w2"]
    ids, births, versions = hand.tokens(60.0, most=5)
    assert ids.tolist() == [b"h0", b"h2", b"h1", b"g0", b"w0"] and len(births) == len(versions) == 5
    assert hand.stats.dropped == 2 and hand.next(60.0) == (waits, 0) and hand.next(60.0) is None
    assert hand.tokens(60.0, most=1)[0].tolist() == [b"h0"]
    assert list(held.lost) == [0, 1, 1] and list(waits.lost) == [1, 1, 1]


def test_what_was_handed_out_and_never_settled_gives_its_credit_back_when_it_is_lost() -> None:
    hand = Hand(10, 1_000)
    load = _load(2)
    hand.arrive(load)
    hand.next(0.0)
    hand.sweep(999.0)
    assert hand.credit.take_owed() == (0, 0)
    hand.sweep(1_000.0)
    assert hand.credit.take_owed() == (2, 20)
    assert (hand.stats.lost, hand.stats.dropped, list(load.lost)) == (1, 1, [1, 1])
    assert hand.loads == []


def test_what_waits_is_extended_at_half_of_its_lease() -> None:
    hand = Hand(10, 1_000)
    load = _load(3)
    load.extend_at_ms = 500.0
    hand.arrive(load)
    hand.next(0.0)
    assert list(hand.to_extend(499.0, 1_000.0)) == []
    ((asked, at),) = hand.to_extend(500.0, 1_000.0)
    assert asked is load and at.tolist() == [1, 2]
    load.extended(at, np.array([2_000, 2_000]), np.array([2_000.0, 2_000.0]))
    hand.sweep(1_500.0)
    assert load.state == bytearray([DONE, WAITING, WAITING]) and hand.next(1_500.0) == (load, 1)


class HandMachine(RuleBasedStateMachine):
    """Whatever happens, credit is neither lost nor made: what a broker was given back, what is owed and what messages
    hold is always all that was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.hand = Hand(1_000, 1_000_000)
        self.loads: list[Load] = []
        self.now_ms = 0.0
        self.sent = self.returned = 0
        self.request = 0
        self.aboard: dict[int, tuple[Places, int]] = {}

    @rule(count=st.integers(1, 5), lease=st.integers(1, 50), size=st.integers(0, 9))
    def arrive(self, count: int, lease: int, size: int) -> None:
        load = _load(count, self.now_ms + lease, f"l{len(self.loads)}-", size)
        self.loads.append(load)
        self.hand.arrive(load)
        self.sent += count

    @rule(by=st.integers(0, 30))
    def wait(self, by: int) -> None:
        self.now_ms += by

    @rule()
    def take(self) -> None:
        taken = self.hand.next(self.now_ms)
        if taken is not None:
            load, index = taken
            assert load.end_ms[index] > self.now_ms and load.state[index] == HANDED

    @rule()
    def take_batch(self) -> None:
        taken = self.hand.next_batch(self.now_ms)
        if taken is not None:
            load, at = taken
            where = np.arange(len(load)) if at is None else at
            assert len(where) and (load.end_ms[where] > self.now_ms).all()

    @rule()
    def sweep(self) -> None:
        self.hand.sweep(self.now_ms)

    @rule(pick=st.randoms(use_true_random=False))
    def settle(self, pick: object) -> None:
        for load in self.loads:
            at = load.where(HANDED)[: pick.randrange(3)]  # type: ignore[attr-defined]
            self.hand.settle(load, np.concatenate([at, at]))

    @rule(pick=st.randoms(use_true_random=False))
    def take_back(self, pick: object) -> None:
        for load in self.loads:
            at = load.where(SETTLING)[: pick.randrange(3)]  # type: ignore[attr-defined]
            self.hand.take_back(load, np.concatenate([at, at]))

    @rule(pick=st.randoms(use_true_random=False))
    def send(self, pick: object) -> None:
        parts = [(load, load.where(SETTLING)[: pick.randrange(3)]) for load in self.loads]  # type: ignore[attr-defined]
        self.request += 1
        places = Places(parts)
        self.aboard[self.request] = places, self.hand.credit.board(self.request, places)[0]

    @rule(taken=st.booleans(), credit_first=st.booleans())
    def answered(self, taken: bool, credit_first: bool) -> None:
        """All was taken, or every other one."""
        if not self.aboard:
            return
        request, (places, rode) = self.aboard.popitem()
        self.returned += rode if taken else 0
        if credit_first:
            self.hand.credit.land(request, taken)
        for load, at in places.parts:
            assert load is not None
            self.hand.finish(load, at[:: 1 if taken else 2])
            self.hand.take_back(load, at)
        if not credit_first:
            self.hand.credit.land(request, taken)

    @rule()
    def stream_ends(self) -> None:
        self.aboard.clear()
        room = self.hand.credit.room()
        assert room[0] == 1_000 - self.hand.credit.held_messages and not self.hand.credit.owed
        self.returned = self.sent - self.hand.credit.held_messages

    @rule()
    def hand_back(self) -> None:
        self.hand.take_waiting()

    @rule()
    def send_credit(self) -> None:
        messages, nbytes = self.hand.credit.take_owed()
        assert messages >= 0 and nbytes >= 0
        self.returned += messages

    @invariant()
    def counts_fit(self) -> None:
        credit = self.hand.credit
        held = [np.frombuffer(load.credit, np.uint8) != GIVEN for load in self.loads]
        assert credit.held_messages == sum(int(each.sum()) for each in held)
        assert credit.held_bytes == sum(
            int(load.sizes[each].sum()) for load, each in zip(self.loads, held, strict=True)
        )
        riding = sum(rode for _, rode in self.aboard.values())
        assert self.sent == credit.held_messages + credit.owed_messages + self.returned
        assert riding <= credit.held_messages
        for load in self.loads:
            assert load.waiting == load.state.count(WAITING)
            assert load.open == len(load) - load.state.count(DONE)
        assert {id(load) for load in self.hand.loads} == {id(load) for load in self.loads if load.open}


HandMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestHand = HandMachine.TestCase


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
    hand = Hand(10, 1_000)
    load = _load(2)
    longest_ms = float((load.frame.lease_until_ms - load.frame.pushed_ms).max())
    load.end_ms[:] = load.earliest_ms = 50.0
    hand.arrive(load)
    hand.next(0.0)
    hand.sweep(60.0)
    assert hand.loads == [] and hand.stats.lost == 1 and hand.stats.dropped == 1
    assert hand.tokens(60.0)[0].tolist() == [b"m0"]
    assert hand.tokens(60.0 + longest_ms)[0].tolist() == []


def test_what_was_given_up_is_forgotten_though_no_stream_ends() -> None:
    hand = Hand(10, 1_000)
    for n in range(100):
        now_ms = 1_000.0 * n
        hand.arrive(_load(1, ends_ms=now_ms + 500.0, name=f"m{n}-"))
        assert hand.next(now_ms) is not None
        hand.sweep(now_ms + 500.0)
    assert hand.stats.lost == 100 and len(hand._given_up) <= 2
