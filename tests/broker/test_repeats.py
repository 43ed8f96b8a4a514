"""Puts sent again: known before anything of the present could refuse them; and what would expire before its due."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.broker.link import Link, broker, statuses
from timeline.broker.api.admission import BEYOND_EXPIRY
from timeline.model import Operation, Status
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.wire import PutFlag

HOUR_MS = 3_600_000


async def _put(link: Link, ids: list[str], births: list[int], expires_in_ms: int, flags: int = PutFlag.IN) -> Any:
    """Puts due in an hour, with an expiry that stays."""
    expires_ms = np.full(len(ids), link.node.clock.now_ms() + expires_in_ms)
    birth = np.array(births, dtype=np.uint64)
    column = np.full(len(ids), flags, dtype=np.uint8)
    return await link.put(ids, HOUR_MS, birth=birth, expires_ms=expires_ms, flags=column)


async def test_a_put_repeated_too_late_for_its_expiry_is_known_by_its_birth():
    async with broker() as link:
        assert statuses(await _put(link, ["a"], [7], 2 * HOUR_MS)) == [Status.OK]
        # As if more than an hour had gone by: the same put, counted from now, would expire before it is due.
        answer = await _put(link, ["a", "a", "b"], [7, 8, 9], HOUR_MS // 2)
        assert statuses(answer) == [Status.DUPLICATE, Status.INVALID, Status.INVALID]
        answers = answer.answers
        assert answers.repeat.tolist() == [1, 0, 0] and answers.version.tolist() == [1, 1, 0]
        assert answers.due_ms[0] > link.node.clock.now_ms() and sorted(answers.details) == [1, 2]
        assert "expires must lie after the due time and after now" in answers.details[1]


async def test_what_would_expire_before_it_is_due_says_so_whoever_finds_it():
    async with broker() as link:
        assert statuses(await _put(link, ["a"], [7], 2 * HOUR_MS)) == [Status.OK]
        for answer in (
            await link.mutate(Operation.MOVE, ["b", "a"], 3 * HOUR_MS),
            await link.put(["b", "a"], 3 * HOUR_MS, flags=np.array([PutFlag.IN, PutFlag.IN | PutFlag.MOVE], np.uint8)),
        ):
            assert statuses(answer)[1] is Status.INVALID
            assert answer.answers.details == {1: BEYOND_EXPIRY}


async def test_a_put_that_moved_is_known_by_its_operation():
    async with broker() as link:
        assert statuses(await link.put(["a"], 1)) == [Status.OK]
        move = PutFlag.IN | PutFlag.MOVE
        assert statuses(await _put(link, ["a"], [7], 2 * HOUR_MS, move)) == [Status.OK]
        answer = await _put(link, ["a"], [7], HOUR_MS // 2, move)
        assert statuses(answer) == [Status.OK]
        assert answer.answers.repeat.tolist() == [1] and answer.answers.version.tolist() == [2]
        assert statuses(await link.mutate(Operation.CANCEL, ["a"])) == [Status.OK]
        assert statuses(await _put(link, ["a"], [7], HOUR_MS // 2, move)) == [Status.INVALID]


async def test_while_the_store_cannot_say_whether_it_is_a_repeat_nobody_does():
    async def fails(*asked: Any) -> Any:
        raise StoreUnavailable("the disk is full")

    async with broker() as link:
        link.node.store.store.put = fails  # type: ignore[method-assign]
        assert statuses(await _put(link, ["a"], [7], HOUR_MS // 2)) == [Status.UNAVAILABLE]
