"""Shares: who goes first, who may have how much of a room, who was there lately."""

from __future__ import annotations

from timeline.broker import fairness
from timeline.broker.fairness import FairQueue, Quota, RecentPeers


def drained(line: FairQueue[str]) -> list[str]:
    return [line.pop() for _ in range(len(line))]


def test_each_connection_is_served_in_its_order_and_none_waits_for_anothers_queue():
    line: FairQueue[str] = FairQueue()
    for at in range(4):
        line.push("h:1", f"a{at}", 1.0)
    for at in range(2):
        line.push("h:2", f"b{at}", 1.0)
    assert line.first() == "a0"
    assert drained(line) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_who_asks_for_little_goes_before_a_queue_however_long_it_was_there():
    line: FairQueue[str] = FairQueue()
    for at in range(100):
        line.push("flood:1", f"f{at}", 10.0)
    assert [line.pop() for _ in range(5)] == [f"f{at}" for at in range(5)]
    line.push("good:1", "g", 1.0)
    assert line.pop() == "g"


def test_costs_count_not_pieces():
    line: FairQueue[str] = FairQueue()
    for at in range(4):
        line.push("large:1", f"l{at}", 3.0)
    for at in range(8):
        line.push("small:1", f"s{at}", 1.0)
    first = [line.pop() for _ in range(8)]
    assert sum(one.startswith("l") for one in first) == 2


def test_a_host_with_many_connections_has_no_more_than_one_with_a_single_one():
    line: FairQueue[str] = FairQueue()
    for connection in range(50):
        for at in range(2):
            line.push(f"many:{connection}", f"m{connection}-{at}", 1.0)
    for at in range(10):
        line.push("single:1", f"s{at}", 1.0)
    assert sum(one.startswith("s") for one in (line.pop() for _ in range(20))) == 10


def test_nobody_is_repaid_for_having_been_idle():
    line: FairQueue[str] = FairQueue()
    for at in range(20):
        line.push("a:1", f"a{at}", 1.0)
    for _ in range(10):
        line.pop()
    for at in range(20):
        line.push("b:1", f"b{at}", 1.0)
    assert sum(one.startswith("b") for one in (line.pop() for _ in range(10))) in (5, 6)


def test_what_was_had_out_of_turn_counts_until_it_is_forgotten():
    line: FairQueue[str] = FairQueue()
    line.charge("a:1", 5.0)
    line.push("a:1", "a", 1.0)
    line.push("b:1", "b", 1.0)
    assert drained(line) == ["b", "a"]
    line.charge("a:1", 5.0)
    line.forget()
    line.push("a:1", "a", 1.0)
    line.push("b:1", "b", 1.0)
    assert drained(line) == ["a", "b"]


def test_peers_that_are_gone_are_forgotten_while_others_still_wait(monkeypatch):
    monkeypatch.setattr(fairness, "MANY_FLOWS", 8)
    line: FairQueue[str] = FairQueue()
    for at in range(1_000):
        line.push("flood:1", "f", 10.0)
        line.push(f"passing{at}:1", "p", 1.0)
        line.pop()
        line.pop()
    assert len(line._peers) <= 8 + 4 + 1
    assert len(line._hosts._served) <= 8 + 4 + 1


def test_a_room_keeps_a_part_for_peers_of_which_nothing_waits():
    room = Quota(160, 1 << 20)
    while room.admits("a:1", 10, 10):
        room.add("a:1", 10, 10)
    assert room.messages == 150
    assert room.admits("b:1", 10, 10)
    assert not room.admits("b:1", 11, 10)


def test_where_several_fill_a_room_none_has_more_of_it_than_is_left():
    room = Quota(1_000_000, 160)
    full = False
    while not full:
        full = True
        for peer in ("a:1", "b:1", "c:1"):
            if room.admits(peer, 1, 10):
                room.add(peer, 1, 10)
                full = False
    assert room.bytes == 120
    assert room.admits("d:1", 1, 40)
    room.remove("a:1", 1, 10)
    assert room.admits("a:1", 1, 10)


def test_a_room_that_is_empty_takes_whatever_is_large_by_itself():
    room = Quota(10, 10)
    assert room.admits("a:1", 100, 100)
    room.add("a:1", 100, 100)
    assert not room.admits("b:1", 1, 1)
    room.remove("a:1", 100, 100)
    assert (room.messages, room.bytes) == (0, 0)


def test_a_crowd_is_of_those_who_were_there_lately():
    now_ms = 0.0
    crowd = RecentPeers(lambda: now_ms, 1_000)
    crowd.seen("a:1")
    crowd.seen("a:1")
    assert not crowd.several
    now_ms = 900.0
    crowd.seen("b:1")
    assert crowd.several
    now_ms = 1_500.0
    assert not crowd.several
    crowd.seen("a:1")
    assert crowd.several


def test_a_host_with_many_connections_leaves_room_for_another():
    room = Quota(320, 1 << 20)
    for connection in range(1_000):
        if room.admits(f"many:{connection}", 1, 1):
            room.add(f"many:{connection}", 1, 1)
    assert room.messages == 310
    assert room.admits("single:1", 10, 10) and not room.admits("single:1", 11, 10)
    room.add("single:1", 1, 1)
    for connection in range(310):
        assert not room.admits("many:1000", 1, 1) or room.messages < 160
        room.remove(f"many:{connection}", 1, 1)
    assert room.admits("many:1000", 100, 100)
    assert room.messages == 1


def test_a_room_forgets_who_has_nothing_there():
    room = Quota(100, 100)
    for connection in range(50):
        room.add(f"a:{connection}", 1, 2)
    for connection in range(50):
        room.remove(f"a:{connection}", 1, 2)
    assert (room.messages, room.bytes, room._of, room._of_host) == (0, 0, {}, {})
