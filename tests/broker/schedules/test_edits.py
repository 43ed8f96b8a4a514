"""Edits of schedules that run: what lies on the timeline and what is produced afterwards, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from tests.broker.machines import TOPIC, Town, town
from tests.broker.schedules.villages import START_MS, change, get, pending, records, schedule, times
from timeline.errors import Exists, Fenced, Invalid, NotFound
from timeline.schedules.record import schedule_of

pytestmark = pytest.mark.slow


async def begin(there: Town, **said: Any) -> None:
    """A broker, a consumer, and a schedule that has run for a minute."""
    await there.broker("b1")
    await there.create_topic()
    there.consume("c")
    await schedule(there, **({"every": "10s"} | said))
    await there.timer.wait(65)


def steps(from_s: int, to_s: int, every_s: int) -> Counter[int]:
    """The times of a period between two, each once."""
    first = -(-(START_MS // 1_000 + from_s) // every_s) * every_s - START_MS // 1_000
    return Counter(range(first, to_s, every_s))


def test_an_update_takes_the_old_times_off_and_produces_the_new_ones() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            found = await change(there, "update", every="7s")
            assert found.revision == 2
            await there.timer.wait(140)

        there.run(story())
        assert times(there) == steps(1, 65, 10) + steps(65, 205, 7)


def test_an_update_that_keeps_what_is_pending_decides_what_follows() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            await change(there, "update", pending="keep", every="7s")
            await there.timer.wait(300)

        there.run(story())
        found = times(there)
        assert set(found.values()) == {1}
        assert {at for at in found if at < 110} == set(steps(1, 110, 10))
        assert {at for at in found if at > 200} == set(steps(201, 366, 7))


def test_an_update_after_one_that_kept_decides_from_now_on() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            await change(there, "update", pending="keep", every="7s")
            await there.timer.wait(1)
            await change(there, "update", every="15s")
            await there.timer.wait(300)

        there.run(story())
        found = times(there)
        later = [at for at in sorted(found) if at > 70]
        assert set(found.values()) == {1} and len(later) >= 19
        assert {after - before for before, after in itertools.pairwise(later)} == {15}


@pytest.mark.parametrize("apart_s", [0.0, 0.01, 5.0])
def test_edits_in_quick_succession_leave_the_last_one(apart_s: float) -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            for every in ("7s", "10s", "11s", "13s"):
                await change(there, "update", every=every)
                await there.timer.wait(apart_s)
            await there.timer.wait(200)

        there.run(story())
        found = Counter({at: count for at, count in times(there).items() if at > 85})
        assert found == steps(86, int(265 + 4 * apart_s), 13)


def test_a_pause_produces_nothing_and_what_lay_in_it_is_not_missed() -> None:
    shown = []
    with town() as there:

        async def story() -> None:
            await begin(there)
            assert (await change(there, "pause")).paused
            assert await pending(there) == []
            await there.timer.wait(300)
            await change(there, "resume")
            await there.timer.wait(100)
            shown.append(await get(there))

        there.run(story())
        assert times(there) == steps(1, 65, 10) + steps(365, 465, 10)
        assert (shown[0].state.missed, shown[0].revision) == (0, 3)


@pytest.mark.parametrize("keep", [False, True])
def test_a_deleted_schedule_produces_no_more(keep: bool) -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            await change(there, "delete", pending="keep" if keep else "cancel")
            assert bool(await pending(there)) is keep
            await there.timer.wait(400)
            assert await get(there) is None
            assert await records(there) == []

        there.run(story())
        found = times(there)
        assert max(found) >= 120 if keep else found == steps(1, 65, 10)


def test_a_name_is_used_again_after_a_delete() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            for _ in range(3):
                await change(there, "delete")
                await schedule(there, every="10s")
            await there.timer.wait(200)

        there.run(story())
        assert times(there) == steps(1, 265, 10)


def test_the_same_schedule_again_is_returned_and_another_one_is_refused() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            assert (await schedule(there, every="10s")).revision == 1
            with pytest.raises(Exists, match="differs in every"):
                await schedule(there, every="11s")
            with pytest.raises(NotFound):
                await there.ask(lambda client: client.schedule("nowhere", "s", every="10s"))

        there.run(story())


def test_many_brokers_create_one_schedule() -> None:
    with town() as there:

        async def story() -> None:
            machines = [await there.broker(f"b{number}") for number in range(3)]
            await there.create_topic()
            there.consume("c")

            async def make(number: int) -> Any:
                await there.timer.wait(number / 10_000)  # each client's random numbers begin with its time
                address = machines[number % 3].address
                return await there.ask(lambda client: client.schedule(TOPIC, "s", every="10s"), address)

            found = await asyncio.gather(*map(make, range(12)))
            assert {one.revision for one in found} == {1}
            await there.timer.wait(100)
            assert len(await records(there)) == 1

        there.run(story())
        assert set(times(there).values()) == {1}


def test_edits_at_many_brokers_are_done_one_after_the_other() -> None:
    with town() as there:

        async def story() -> None:
            machines = [await there.broker(f"b{number}") for number in range(3)]
            await there.create_topic()
            there.consume("c")
            await schedule(there, every="10s")
            await there.timer.wait(65)

            async def edit(number: int) -> None:
                await there.timer.wait(number / 10_000)  # each client's random numbers begin with its time

                async def work(client: Any) -> None:
                    found = await client.get_schedule(TOPIC, "s")
                    await found.update(payload=f"edit {number}")

                await there.ask(work, machines[number % 3].address)

            await asyncio.gather(*map(edit, range(6)))
            await there.timer.wait(2)
            assert (await get(there)).revision == 7
            await there.timer.wait(100)

        there.run(story())
        assert times(there) == steps(1, 167, 10)


def test_an_edit_of_another_revision_is_fenced() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            await change(there, "update", every="7s")
            with pytest.raises(Fenced, match="at revision 2, not 1"):
                await change(there, "update", every="8s", if_revision=1)
            with pytest.raises(Invalid, match="no field 'evry'"):
                await change(there, "update", evry="8s")

        there.run(story())


def test_a_trigger_produces_one_message_beside_the_times() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            receipt = await change(there, "trigger")
            assert receipt.id.endswith(".trigger")
            assert schedule_of(receipt.id) is not None
            await there.timer.wait(10)
            assert [one.id for one in there.received].count(receipt.id) == 1

        there.run(story())


def test_a_backfill_produces_what_was_not_produced() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there)
            begin_ms = START_MS - 600_000
            counted = await change(there, "backfill", start=begin_ms, end=START_MS + 65_000, dry_run=True)
            assert (counted.produced, counted.present) == (61, 6)
            done = await change(there, "backfill", start=begin_ms, end=START_MS + 65_000)
            assert done == counted
            again = await change(there, "backfill", start=begin_ms, end=START_MS + 65_000)
            assert (again.produced, again.present) == (0, 67)
            await there.timer.wait(5)

        there.run(story())
        assert times(there) == steps(-600, 71, 10)


def test_a_dry_run_of_a_backfill_takes_nothing_off_whoever_owns_it() -> None:
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            await schedule(there, every="10s", group="~nobody")
            await there.timer.wait(65)
            before = await pending(there)
            await change(there, "backfill", start=START_MS, end=START_MS + 65_000, dry_run=True)
            assert len(before) >= 6
            assert await pending(there) == before

        there.run(story())


def test_occurrences_wait_while_their_topic_is_not_there() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there, catch_up="all")
            await there.ask(lambda client: client.drop_topic(TOPIC))
            await there.timer.wait(300)
            found = await get(there)
            assert found.warnings == ("there is no topic 't': occurrences wait until it is there",)
            await there.create_topic(remember="2h")
            there.consume("d")
            await there.timer.wait(120)

        there.run(story())
        late = [one for one in there.received if one.consumer == "d"]
        assert len({one.id for one in late}) == len(late) >= 36


def test_the_topic_remembers_for_as_long_as_the_window() -> None:
    with town() as there:

        async def story() -> None:
            await begin(there, window="3h")

            async def work(client: Any) -> Any:
                (topic,) = await client.topics()
                await client.update_topic(TOPIC, remember="1h")
                return topic.settings.remember_ms

            assert await there.ask(work) == 3 * 3_600_000 + 600_000
            (said,) = (await get(there)).warnings
            assert "`timeline topic update t --remember 190m`" in said

        there.run(story())


def test_a_topic_remembers_for_the_longest_of_the_schedules_that_are_created_at_once() -> None:
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            windows = ("2h", "7d", "1h")

            async def work(client: Any) -> Any:
                made = (client.schedule(TOPIC, window, every="1h", window=window) for window in windows)
                await asyncio.gather(*made)
                (topic,) = await client.topics()
                return topic.settings.remember_ms

            assert await there.ask(work) == 7 * 86_400_000 + 600_000

        there.run(story())
