"""The proof of the suite beyond the table: each faulty store is found by the check that is named beside it."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage_plugins import faulty_leases, faulty_limits, faulty_stores
from timeline.errors import Invalid
from timeline.model import Topic
from timeline.storage_plugins.conformance import CHECKS, Outcome, Result, StoreViolation, run_check, run_suite
from timeline.storage_plugins.conformance.crowd import dump_store
from timeline.storage_plugins.conformance.trial import T0, Trial
from timeline.storage_plugins.contract import Page, ScanFilter, Store, StoreRefused, Swept
from timeline.storage_plugins.memory import MemoryStore

pytestmark = pytest.mark.slow  # about the suite itself, which the stores' own tests run

FAULTS = faulty_leases.FAULTS


def test_faulty_stores_of_all_groups_are_there() -> None:
    modules = {faulty.__module__ for faulty in FAULTS}
    assert modules == {faulty_leases.__name__, faulty_limits.__name__, faulty_stores.__name__}


@pytest.mark.parametrize(("faulty", "check"), FAULTS.items(), ids=[faulty.__name__ for faulty in FAULTS])
async def test_a_faulty_store_is_found(faulty: type[Store], check: str) -> None:
    result = await run_check(check, faulty)
    assert result.outcome is Outcome.FAILED, f"{check} passed on {faulty.__name__}"
    assert result.found


async def test_a_dump_whose_pages_lack_payloads_says_so() -> None:
    class Bare(MemoryStore):
        async def scan(
            self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
        ) -> Page:
            return await super().scan(topic, now_ms, where, cursor, limit, False)

    async with Trial(Bare) as trial:
        topic = await trial.topic_with([b"a"])
        with pytest.raises(StoreViolation, match="asked for payloads came without them"):
            await dump_store(trial.store, [topic], T0)


async def test_a_store_that_raises_fails_its_checks_and_the_others_go_on() -> None:
    class Breaks(MemoryStore):
        async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
            raise ZeroDivisionError("not a store's error")

    report = await run_suite(Breaks, ["sweep_of_nothing", "ack_deletes"])
    assert [result.outcome for result in report.results] == [Outcome.FAILED, Outcome.PASSED]
    assert "ZeroDivisionError: not a store's error" in report.results[0].found
    assert not report.ok


async def test_a_store_that_hangs_fails_its_check() -> None:
    class Hangs(MemoryStore):
        async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
            await asyncio.Event().wait()
            raise AssertionError

    result = await run_check("sweep_of_nothing", Hangs, timeout_s=0.05)
    assert (result.outcome, result.found) == (Outcome.FAILED, "not done after 0.05 s")


async def test_what_a_check_found_is_not_hidden_by_trouble_that_follows_it() -> None:
    class Breaks(faulty_leases.EarlyByAMillisecond):
        async def drop_topic(self, topic: Topic) -> bool:
            raise ZeroDivisionError("cannot drop")

    result = await run_check("lease_is_never_early", Breaks)
    first, second = result.found.splitlines()
    assert first.startswith("ids leased at T0 + 2: ")
    assert second == "Then dropping the check's topics raised ZeroDivisionError: cannot drop"
    result = await run_check("ack_deletes", Breaks)
    assert result.found == "raised ZeroDivisionError: cannot drop\nThe plugin's drop_topic raised it."


async def test_a_store_that_cannot_be_opened_fails_every_check_it_runs() -> None:
    class Closed(MemoryStore):
        async def check(self) -> None:
            raise OSError("no such disk")

    report = await run_suite(Closed, list(CHECKS)[:5])
    assert len(report.failed) == 5


async def test_only_some_checks_and_a_word_for_each_result() -> None:
    told: list[Result] = []
    report = await run_suite("memory://", ["ack_deletes", "durable_store_keeps_everything"], told.append)
    assert told == report.results
    assert report.counts() == {"passed": 1, "failed": 0, "skipped": 1}
    assert report.ok


async def test_a_check_that_does_not_exist_is_named() -> None:
    listed = rf"'timeline check-store --list' lists all {len(CHECKS)}$"
    with pytest.raises(Invalid, match=rf"no such check: 'ack_delets'\. Did you mean ack_deletes.*\? {listed}"):
        await run_suite("memory://", ["ack_deletes", "ack_delets"])
    with pytest.raises(Invalid, match=rf"no such check: 'WRONG'\. {listed}"):
        await run_suite("memory://", ["WRONG"])


async def test_a_url_that_names_no_store_is_refused() -> None:
    with pytest.raises(StoreRefused, match="did you mean memory"):
        await run_suite("memroy://", ["ack_deletes"])


def test_every_check_has_a_sentence() -> None:
    assert len(CHECKS) >= 90
    assert all(check.sentence.endswith(".") and len(check.sentence) > 25 for check in CHECKS.values())


async def test_a_failed_result_raises_what_must_hold_and_what_was_seen() -> None:
    faulty, name = next(iter(FAULTS.items()))
    result = await run_check(name, faulty)
    with pytest.raises(StoreViolation) as raised:
        result.raise_failed()
    assert result.sentence in str(raised.value) and result.found in str(raised.value)
