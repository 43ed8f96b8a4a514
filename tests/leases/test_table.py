"""The table of rules, case by case, against the same rules told as sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.leases.cases import ANNA, BIRTH, NOW, PLAIN, SUM, VERSION, messages, questions
from tests.leases.sentences import SENTENCES, Case, Sentence, read
from timeline.leases.table import EFFECTS, GUARDS, Ask, Message, decide, is_expired, state_of
from timeline.model import PRECEDENCE, Operation, State, Status, TopicSettings

STATES_DOC = Path(__file__).resolve().parents[2] / "design-docs" / "02-message-states.md"

# As the design puts it, word for word.
ORDER = [
    "INVALID",
    "TOO_LARGE",
    "THROTTLED",
    "NOT_FOUND",
    "FORBIDDEN",
    "FENCED",
    "LEASED",
    "DEAD",
    "EXISTS",
    "DUPLICATE",
    "EXPIRED",
    "OK",
]

everything = pytest.mark.parametrize("operation", list(Operation), ids=lambda operation: operation.name.lower())


@pytest.mark.slow
@everything
def test_each_case_is_answered_as_the_sentences_say(operation: Operation) -> None:
    heard: set[str] = set()
    count = 0
    for message, ask, settings in questions(operation):
        sentence, expected = read(Case(message, ask, NOW, settings))
        decided = decide(message, ask, NOW, settings)
        if decided != expected:
            pytest.fail(f"{sentence.says!r}\n{message}\n{ask}\n{settings}\nexpected {expected}\n     got {decided}")
        heard.add(sentence.says)
        count += 1
    # A sentence that no case reaches would prove nothing; nor would an enumeration that had shrunk.
    assert heard == {sentence.says for sentence in SENTENCES[operation]} - _UNREACHABLE.get(operation, set())
    assert count > 2_000


_UNREACHABLE: dict[Operation, set[str]] = {}


def _refusals(operation: Operation) -> list[Sentence]:
    return [line for line in SENTENCES[operation] if line.status is not Status.OK and not line.repeat]


@everything
@pytest.mark.slow
def test_where_several_refuse_the_first_in_the_order_is_the_answer(operation: Operation) -> None:
    """Not for a put: what it meets at all depends on what was asked and on what has expired (see `sentences`), so that
    its lines are no conditions by themselves."""
    assert [status.value for status in PRECEDENCE] == ORDER
    if operation is Operation.PUT:
        return
    contested: dict[str, set[str]] = defaultdict(set)
    lines = _refusals(operation)
    for message, ask, settings in questions(operation):
        case = Case(message, ask, NOW, settings)
        refusing = {line.status.value for line in lines if line.true(case)}
        decided = decide(message, ask, NOW, settings)
        if decided.repeat or not refusing:
            assert decided.status is Status.OK
            continue
        assert decided.status.value == min(refusing, key=ORDER.index)
        contested[decided.status.value] |= refusing - {decided.status.value}
    # A bury is refused for one reason at a time: what has no row has no holder, and a dead letter keeps its token.
    assert any(contested.values()) is (operation is not Operation.BURY)


Seen = dict[tuple[State, Operation], frozenset[Status]]
Touched = dict[Operation, set[str]]


@cache
def _survey() -> tuple[Seen, Touched]:
    """Over all cases, repeats apart: which statuses each state answered to each operation, and which fields of a
    message each operation changed."""
    seen: dict[tuple[State, Operation], set[Status]] = defaultdict(set)
    touched: Touched = defaultdict(set)
    names = [field.name for field in fields(Message)]
    for operation in Operation:
        for message, ask, settings in questions(operation):
            decided = decide(message, ask, NOW, settings)
            if decided.repeat:
                assert decided.message is None or decided.message is message
                continue
            seen[state_of(message, NOW), operation].add(decided.status)
            after = decided.message
            if message is not None and after is not None and after is not message and not decided.born:
                touched[operation] |= {name for name in names if getattr(message, name) != getattr(after, name)}
    return {pair: frozenset(statuses) for pair, statuses in seen.items()}, touched


@pytest.mark.slow
def test_what_has_no_effect_is_refused_and_what_has_one_can_succeed() -> None:
    seen, _ = _survey()
    for state in State:
        for operation in set(GUARDS) - {Operation.PUT}:
            succeeded = Status.OK in seen[state, operation]
            assert succeeded == ((state, operation) in EFFECTS), (state, operation)
    assert set(GUARDS) == set(Operation)


@pytest.mark.slow
def test_the_documents_table_is_what_the_rules_do() -> None:
    rows = [line for line in STATES_DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    start = next(at for at, line in enumerate(rows) if line.startswith("| operation | absent"))
    told: dict[tuple[State, Operation], frozenset[Status]] = {}
    for line in rows[start + 1 : start + 1 + len(Operation)]:
        name, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
        for state, cell in zip(State, cells, strict=True):
            told[state, Operation[name.upper()]] = frozenset(Status(word) for word in re.findall(r"[A-Z_]{2,}", cell))
    assert told == _survey()[0]


@pytest.mark.slow
def test_the_fields_that_an_operation_may_touch() -> None:
    """Fixed is what the design calls fixed; everything else only where its operation says so."""
    asked = {"due_ms", "scheduled_ms", "asked_ms", "holder", "version", "last_op"}
    assert _survey()[1] == {
        Operation.PUT: asked,
        Operation.MOVE: asked,
        Operation.LEASE: {"due_ms", "holder", "version", "deliveries"},
        Operation.REGRANT: {"due_ms", "version", "deliveries"},
        Operation.EXTEND: {"due_ms"},
        Operation.RELEASE: asked | {"deliveries"},
        Operation.BURY: {"dead", "died_ms"},
        Operation.REVIVE: asked | {"deliveries", "dead", "died_ms"},
    }


@pytest.mark.parametrize(
    ("due", "holder", "died", "state"),
    [
        (NOW + 1, b"", 0, State.WAITING),
        (NOW, b"", 0, State.AVAILABLE),
        (NOW - 1, b"", 0, State.AVAILABLE),
        (NOW + 1, ANNA, 0, State.LEASED),
        (NOW, ANNA, 0, State.AVAILABLE),
        (NOW + 1, b"", 1, State.DEAD),
        (NOW + 1, ANNA, 1, State.DEAD),
        (NOW, ANNA, 1, State.DEAD),
    ],
)
def test_a_state_is_derived_from_due_holder_and_death(due: int, holder: bytes, died: int, state: State) -> None:
    message = Message(BIRTH, VERSION, due_ms=due, holder=holder, died_ms=died)
    assert state_of(message, NOW) is state


def test_what_is_not_stored_has_a_state_too() -> None:
    assert state_of(None, NOW) is State.ABSENT
    assert state_of(Message(BIRTH, VERSION, due_ms=NOW + 1, holder=ANNA, remembered=True), NOW) is State.SETTLED


def test_a_live_lease_and_a_dead_letter_outlive_expiry() -> None:
    for message in messages():
        if message is not None:
            expected = 0 < message.expires_ms <= NOW and state_of(message, NOW) in (State.WAITING, State.AVAILABLE)
            assert is_expired(message, NOW) == expected


# The few that a reader would look for first, in full, so that a slip in both tellings shows.
@pytest.mark.parametrize(
    ("message", "ask", "status"),
    [
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW, holder=ANNA, expires_ms=NOW),
            Ask(Operation.ACK, birth=BIRTH, version=VERSION, holder=ANNA),
            Status.OK,
            id="a late ack of what has expired counts while nobody touched it",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 1),
            Ask(Operation.ACK, birth=BIRTH, version=VERSION, holder=b""),
            Status.FENCED,
            id="nobody cannot settle what nobody holds",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW, deliveries=25),
            Ask(Operation.BURY, birth=BIRTH, version=VERSION, holder=b""),
            Status.OK,
            id="the broker buries what was delivered out and released",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 9, holder=ANNA, deliveries=25),
            Ask(Operation.REGRANT, birth=BIRTH, version=VERSION, holder=ANNA, time_ms=NOW + 99),
            Status.DEAD,
            id="what was delivered out is not let again",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 9, payload_sum=SUM, group=b"ops"),
            Ask(Operation.PUT, birth=BIRTH + 1, payload_sum=SUM, group=b"sales"),
            Status.FORBIDDEN,
            id="a put of the same payload under another group's id is forbidden",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW - 9, payload_sum=SUM, group=b"ops", expires_ms=NOW),
            Ask(Operation.PUT, time_ms=NOW, birth=BIRTH + 1, payload_sum=SUM, group=b"sales"),
            Status.OK,
            id="what has expired is in nobody's way",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 9, payload_sum=SUM, group=b"ops"),
            Ask(Operation.PUT, time_ms=NOW, birth=BIRTH + 1, payload_sum=SUM, group=b"ops", replace=True),
            Status.OK,
            id="a put replaces even what has its payload",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 9, group=b"ops"),
            Ask(Operation.PUT, time_ms=NOW, birth=BIRTH + 1, group=b"sales", move=True),
            Status.FORBIDDEN,
            id="a put that moves another group's message is forbidden",
        ),
        pytest.param(
            Message(BIRTH, VERSION, due_ms=NOW + 9, holder=ANNA, group=b"ops"),
            Ask(Operation.MOVE, time_ms=NOW, group=b"ops", if_version=VERSION - 1),
            Status.FENCED,
            id="a stale version is answered before the lease is",
        ),
    ],
)
def test_in_full(message: Message, ask: Ask, status: Status) -> None:
    assert decide(message, ask, NOW, TopicSettings()).status is status


def test_a_stale_token_changes_nothing_even_where_it_expired() -> None:
    message = Message(BIRTH, VERSION, due_ms=NOW - 1, holder=ANNA, expires_ms=NOW - 1)
    for operation in (Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY, Operation.REGRANT):
        decided = decide(message, Ask(operation, birth=BIRTH, version=VERSION - 1, holder=ANNA), NOW, PLAIN)
        assert (decided.status, decided.message) == (Status.FENCED, message)
