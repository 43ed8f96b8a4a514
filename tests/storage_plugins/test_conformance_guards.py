"""The proof of the suite: a store that leaves out one guard of the operation table fails a check that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from timeline.leases import Ask, Decision, Message, table
from timeline.model import Operation, Status, TopicSettings
from timeline.storage_plugins.conformance import Outcome, run_check
from timeline.storage_plugins.memory import MemoryStore, changes

Decide = Callable[[Message | None, Ask, int, TopicSettings], Decision]

NOT_THERE = "remembered_ids_are_not_there"
CAUGHT_BY = {
    (Operation.PUT, "_never_deliverable"): "put_beyond_its_expiry",
    (Operation.PUT, "_moves_beyond_expiry"): "put_that_moves",
    (Operation.PUT, "_not_owner"): "put_of_another_groups_id",
    (Operation.PUT, "_is_leased_and_wanted"): "put_that_replaces",
    (Operation.PUT, "_is_dead_and_wanted"): "put_that_replaces",
    (Operation.PUT, "_is_another"): "put_of_a_taken_id",
    (Operation.PUT, "_is_its_like"): "put_of_a_taken_id",
    (Operation.LEASE, "_not_there"): NOT_THERE,
    (Operation.LEASE, "_is_leased"): "lease_runs_out",
    (Operation.LEASE, "_is_dead"): "dead_letters_are_not_leased",
    (Operation.LEASE, "_has_expired"): "expired_is_not_leased",
    (Operation.LEASE, "_delivered_out"): "max_deliveries",
    (Operation.LEASE, "_not_yet"): "lease_is_never_early",
    (Operation.EXTEND, "_not_there"): NOT_THERE,
    (Operation.EXTEND, "_not_holder"): "fencing",
    (Operation.EXTEND, "_is_dead"): "bury",
    (Operation.EXTEND, "_has_expired"): "expired_after_its_lease",
    (Operation.ACK, "_not_there"): NOT_THERE,
    (Operation.ACK, "_not_holder"): "fencing",
    (Operation.ACK, "_is_dead"): "bury",
    (Operation.RELEASE, "_not_there"): NOT_THERE,
    (Operation.RELEASE, "_not_holder"): "stale_tokens",
    (Operation.RELEASE, "_is_dead"): "bury",
    (Operation.RELEASE, "_released_beyond_expiry"): "release_beyond_expiry",
    (Operation.BURY, "_not_there"): NOT_THERE,
    (Operation.BURY, "_not_to_bury"): "nobody_settles_what_nobody_holds",
    (Operation.REGRANT, "_not_there"): NOT_THERE,
    (Operation.REGRANT, "_not_holder"): "fencing",
    (Operation.REGRANT, "_is_dead"): "bury",
    (Operation.REGRANT, "_delivered_out"): "regrant",
    (Operation.REGRANT, "_has_expired"): "expired_after_its_lease",
    (Operation.MOVE, "_living_beyond_expiry"): "move_and_expiry",
    (Operation.MOVE, "_not_there"): NOT_THERE,
    (Operation.MOVE, "_not_owner"): "ownership",
    (Operation.MOVE, "_other_version"): "if_version",
    (Operation.MOVE, "_is_leased"): "mutations_by_state",
    (Operation.MOVE, "_is_dead"): "mutations_by_state",
    (Operation.MOVE, "_has_expired"): "move_and_expiry",
    (Operation.CANCEL, "_not_there"): NOT_THERE,
    (Operation.CANCEL, "_not_owner"): "ownership",
    (Operation.CANCEL, "_other_version"): "if_version",
    (Operation.CANCEL, "_is_leased_and_spared"): "cancel_leased",
    (Operation.CANCEL, "_is_dead"): "mutations_by_state",
    (Operation.CANCEL, "_has_expired"): "move_and_expiry",
    (Operation.REVIVE, "_beyond_expiry"): "move_and_expiry",
    (Operation.REVIVE, "_not_there"): NOT_THERE,
    (Operation.REVIVE, "_not_owner"): "ownership",
    (Operation.REVIVE, "_other_version"): "if_version",
    (Operation.REVIVE, "_is_leased"): "mutations_by_state",
    (Operation.REVIVE, "_is_alive"): "mutations_by_state",
    (Operation.PURGE, "_not_there"): NOT_THERE,
    (Operation.PURGE, "_not_owner"): "ownership",
    (Operation.PURGE, "_other_version"): "if_version",
    (Operation.PURGE, "_is_leased"): "mutations_by_state",
    (Operation.PURGE, "_is_alive"): "mutations_by_state",
}


def _guards() -> list[tuple[Operation, str]]:
    return [(operation, guard.__name__) for operation, guards in table.GUARDS.items() for _, guard in guards]


def _without(operation: Operation, name: str, decide: Decide) -> Decide:
    """`decide` as it would be if `operation` had no guard `name`; the table that the suite judges by stays."""
    whole = table.GUARDS[operation]
    rest = tuple((status, guard) for status, guard in whole if guard.__name__ != name)
    assert len(rest) == len(whole) - 1

    def decide_without(message: Message | None, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
        table.GUARDS[operation] = rest
        try:
            return decide(message, ask, now_ms, settings)
        finally:
            table.GUARDS[operation] = whole

    return decide_without


def test_every_guard_is_proven() -> None:
    assert len(set(_guards())) == len(_guards())
    assert set(_guards()) == CAUGHT_BY.keys()


def _by(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> Callable[[], MemoryStore]:
    """Makes memory stores that ask `decide` for everything."""
    monkeypatch.setattr(changes, "decide", decide)
    return lambda: MemoryStore(fast=False)


@pytest.mark.slow
@pytest.mark.parametrize(("guard", "check"), CAUGHT_BY.items())
async def test_a_missing_guard_is_caught(
    guard: tuple[Operation, str], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _by(_without(*guard, table.decide), monkeypatch)
    result = await run_check(check, make)
    assert result.outcome is Outcome.FAILED, f"{check} passed without {guard}"
    assert result.sentence and result.found


REPEATS = {
    Operation.MOVE: "repeated_move",
    Operation.RELEASE: "release",
    Operation.REVIVE: "repeated_revive",
    Operation.BURY: "bury",
    Operation.CANCEL: "remembered_ids",
    Operation.PUT: "repeated_put",
}


@pytest.mark.parametrize(("operation", "check"), REPEATS.items())
async def test_an_unknown_repeat_is_caught(operation: Operation, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes each repeat of `operation` for a new call."""

    def forgetful(message: Message | None, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
        if ask.operation is not operation:
            return table.decide(message, ask, now_ms, settings)
        with monkeypatch.context() as patch:
            patch.setattr(table, "_is_repeat", lambda _: False)
            decision = table.decide(message, ask, now_ms, settings)
        if operation is Operation.PUT and decision.repeat:
            return Decision(Status.EXISTS, message)
        return decision

    result = await run_check(check, _by(forgetful, monkeypatch))
    assert result.outcome is Outcome.FAILED, f"{check} passed without repeats of {operation.name}"


@pytest.mark.parametrize("check", ["put_of_an_expired_id", "put_of_an_expired_id_that_is_remembered"])
async def test_a_put_that_takes_an_expired_message_for_a_living_one_is_caught(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unaware(message: Message | None, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
        with monkeypatch.context() as patch:
            if ask.operation is Operation.PUT:
                patch.setattr(table, "is_expired", lambda message, now_ms: False)
            return table.decide(message, ask, now_ms, settings)

    result = await run_check(check, _by(unaware, monkeypatch))
    assert result.outcome is Outcome.FAILED, f"{check} passed"


@pytest.mark.slow
async def test_the_whole_table_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _by(table.decide, monkeypatch)
    for check in sorted({*CAUGHT_BY.values(), *REPEATS.values()}):
        (await run_check(check, make)).raise_failed()
