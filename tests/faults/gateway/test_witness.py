"""The witness tells leases and settles from lines of PostgreSQL's log."""

from __future__ import annotations

from tests.faults.gateway.witness import Witness
from tests.faults.worker import TOPIC
from timeline.history import OK, Event, check

HOLDER = "'\\x" + b"pull:b1:1234".hex() + "'"
NOBODY = "'\\x'"
WALL_MS = 1_795_639_668_500.0


def _lines(what: str, **columns: object) -> list[str]:
    """A commit with one change of message `a` of birth 2^64 - 1."""
    row = {"version": 1, "due_ms": 0, "scheduled_ms": 0, "holder": NOBODY, "died_ms": 0, "birth": -1, **columns}
    shown = " ".join(f"{name}[{'bytea' if name == 'holder' else 'bigint'}]:{value}" for name, value in row.items())
    change = f"table timeline.message: {what}: bucket[smallint]:7 id[bytea]:'\\x61' {shown} dead[bytea]:'\\x'"
    if what == "DELETE":
        change = "table timeline.message: DELETE: topic[bigint]:1 bucket[smallint]:7 id[bytea]:'\\x61'"
    noise = "table timeline.payload: INSERT: payload[bytea]:'\\x69645b62797465615d'"
    return ["BEGIN 758", change, noise, "COMMIT 758 (at 2026-11-25 20:47:48.5+00)"]


LEASED = _lines("INSERT") + _lines("UPDATE", version=2, due_ms=3_000, holder=HOLDER)
BIRTH = 2**64 - 1


def _told(lines: list[str], moved: frozenset[tuple[str, int]] = frozenset(), cancelled: str = "") -> Witness:
    told = Witness(WALL_MS - 500.0, moved, frozenset(cancelled))
    told.hear(lines)
    return told


def test_a_lease_and_its_ack() -> None:
    told = _told(LEASED + _lines("DELETE"))
    assert told.lease_ends == {("a", BIRTH, 2): 3_000}
    (ack,) = told.settles
    assert (ack.operation, ack.outcome, ack.wall_ms) == ("ack", "ok", WALL_MS)
    assert ack.invoked < 500.0 < ack.returned
    named = {name: ack.arguments[name] for name in ("id", "birth", "version", "consumer")}
    assert named == {"id": "a", "birth": BIRTH, "version": 2, "consumer": "pull:b1:1234"}


def test_releases_extends_and_burials() -> None:
    released = _told(LEASED + _lines("UPDATE", version=3, due_ms=900, scheduled_ms=900)).settles
    assert [(one.operation, one.arguments["due_ms"], one.result["version"]) for one in released] == [
        ("release", 900, 3)
    ]
    extended = _told(LEASED + _lines("UPDATE", version=2, due_ms=7_000, holder=HOLDER)).settles
    assert [(one.operation, one.result["lease_until_ms"]) for one in extended] == [("extend", 7_000)]
    buried = _told(LEASED + _lines("UPDATE", version=2, due_ms=3_000, holder=HOLDER, died_ms=5)).settles
    assert [one.operation for one in buried] == ["bury"]


def test_what_producers_did_is_no_settle() -> None:
    moved = LEASED + _lines("UPDATE", version=3, due_ms=900, scheduled_ms=900)
    assert _told(moved, frozenset({("a", 3)})).settles == []
    assert _told(LEASED + _lines("DELETE"), cancelled="a").settles == []
    again = LEASED + _lines("UPDATE", version=3, due_ms=9_000, holder=HOLDER)
    assert _told(again).settles == [] and _told(again).lease_ends["a", BIRTH, 3] == 9_000


def _repeated(version: int, at: float, told: Witness) -> Event:
    """A delivery `at` ms after the lease began. Its lease ends when the log says."""
    token = {"topic": TOPIC, "id": "a", "birth": BIRTH, "version": version}
    times = {"due_ms": 0, "scheduled_ms": 0, "lease_until_ms": told.lease_ends["a", BIRTH, version]}
    seen = {**token, **times, "consumer": "pull:b1:1234", "sum": 1}
    return Event("receiver", "receive", seen, at, at, WALL_MS - 500.0 + at, OK)


def test_a_repeat_holds_only_if_the_log_explains_it() -> None:
    put = Event("p1", "put", {"topic": TOPIC, "id": "a", "due_ms": 0, "sum": 1}, 0.0, 1.0, 0.0, OK, {"status": "OK"})
    ends_ms = round(WALL_MS) + 3_000
    lease = _lines("INSERT") + _lines("UPDATE", version=2, due_ms=ends_ms, holder=HOLDER)
    release = _lines("UPDATE", version=3, due_ms=0, scheduled_ms=0)
    explained = _told(lease + release + _lines("UPDATE", version=4, due_ms=ends_ms, holder=HOLDER) + _lines("DELETE"))
    again = _told(lease + _lines("UPDATE", version=4, due_ms=ends_ms, holder=HOLDER) + _lines("DELETE"))
    for told, broken in ((explained, set()), (again, {"S10"})):
        receives = [_repeated(2, 450.0, told), _repeated(4, 600.0, told)]
        verdict = check([put, *receives, *told.settles], [], clock_bound_ms=0.2)
        assert {one.invariant for one in verdict.violations} == broken, verdict.summary()
