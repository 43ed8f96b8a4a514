"""Who may do what with schedules, and that nobody writes into the internal topic by any method."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.broker.link import Link, broker, statuses
from tests.broker.schedules.calls import FAR_MS, ask, create, shown
from timeline.broker.api.access import ANYBODY, Principal, Right
from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.schedules.record import SCHEDULES_GROUP, SCHEDULES_TOPIC
from timeline.wire import (
    Fault,
    Mutate,
    Mutated,
    MutateTag,
    Produced,
    Scan,
    ScanPage,
    ScheduleAction,
    Settle,
    Settled,
    Take,
    TopicAction,
    TopicList,
    Topics,
    TransportError,
    decode_as,
    encode,
)

CALLERS = {
    "anybody": ANYBODY,
    "all rights": Principal("root", "1", frozenset(Right)),
    "an operator": Principal("ops", "2", frozenset(Right), as_operator=True),
}


async def stored(link: Link) -> list[bytes]:
    """The ids of the records that are there."""
    pages = link.node.service.unary_stream("Scan", encode(Scan(SCHEDULES_TOPIC)))
    return [id async for page in pages for id in decode_as(page, ScanPage).rows.ids.tolist()]


@pytest.mark.parametrize("name", CALLERS)
async def test_no_method_writes_into_the_internal_topic(name: str) -> None:
    caller = CALLERS[name]
    async with broker() as link:
        await create(link, every_ms=3_600_000, start_ms=FAR_MS)
        before = await stored(link)
        assert len(before) == 1
        ids, one, op = Ragged.of(before), np.ones(1, np.int64), np.ones(1, np.uint64)
        call = link.node.service.unary
        put = link.puts(["x"], topic=SCHEDULES_TOPIC, group=SCHEDULES_GROUP)
        assert statuses(decode_as(await call("Put", encode(put), caller), Produced)) == [Status.FORBIDDEN]
        for operation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
            flags = np.zeros(1, np.uint8)
            asked = Mutate(SCHEDULES_TOPIC, SCHEDULES_GROUP, operation, ids, one, flags, one - 1, op)
            assert statuses(decode_as(await call("Mutate", encode(asked), caller), Mutated)) == [Status.FORBIDDEN]
        ack = np.array([Operation.ACK], np.uint8)
        settle = Settle(1, ids, op, one, ack, one, ack * 0, op, topic=SCHEDULES_TOPIC, holder="h")
        assert statuses(decode_as(await call("Settle", encode(settle), caller), Settled)) == [Status.FORBIDDEN]
        for action in (TopicAction.CREATE, TopicAction.UPDATE, TopicAction.DROP, TopicAction.ROTATE):
            frame = Topics(action, SCHEDULES_TOPIC, {"paused": True} if action is TopicAction.UPDATE else {})
            answer = decode_as(await call("Topics", encode(frame), caller), TopicList)
            assert answer.status == Status.FORBIDDEN.code
            assert "only brokers change what is in it" in answer.detail or "right" in answer.detail
        for method, refused in (
            ("Take", Take(SCHEDULES_TOPIC)),
            ("Mutate", MutateTag(SCHEDULES_TOPIC, SCHEDULES_GROUP, Operation.CANCEL, b"t/s", 1)),
        ):
            with pytest.raises(TransportError, match="internal") as fault:
                await call(method, encode(refused), caller)
            assert fault.value.fault is Fault.FORBIDDEN
        assert await stored(link) == before


async def test_a_consumer_of_the_internal_topic_is_refused() -> None:
    async with broker() as link:
        await create(link, every_ms=3_600_000)
        with pytest.raises(AssertionError, match="the broker ended the stream"):
            await link.consume(topic=SCHEDULES_TOPIC)


def bearer(*rights: Right, groups: tuple[str, ...] = ("*",), topics: tuple[str, ...] = ("*",)) -> Principal:
    return Principal("t", "1", frozenset(rights), topics, groups)


async def test_managing_a_schedule_takes_two_rights_and_a_topic_that_remembers() -> None:
    said = {"every_ms": 60_000}
    async with broker() as link:

        async def status(caller: Principal, **more: object) -> tuple[Status, str]:
            answer = await ask(link, ScheduleAction.CREATE, caller=caller, body=said | more)
            return Status.of(answer.status), answer.detail

        assert (await status(bearer(Right.PRODUCE)))[1].startswith("token 't' may not manage schedules")
        assert (await status(bearer(Right.SCHEDULE)))[1].startswith("token 't' may not put messages")
        other = bearer(Right.SCHEDULE, Right.PRODUCE, groups=("web",))
        assert "for group 'default'" in (await status(other))[1]
        both = bearer(Right.SCHEDULE, Right.PRODUCE)
        refused, why = await status(both)
        assert refused is Status.FORBIDDEN
        assert "`timeline topic update t --remember 70m` sets it, with the right admin" in why
        assert (await status(bearer(Right.SCHEDULE, Right.PRODUCE, Right.ADMIN)))[0] is Status.OK
        assert (await status(both))[0] is Status.DUPLICATE
        for action in (ScheduleAction.PAUSE, ScheduleAction.TRIGGER, ScheduleAction.DELETE, ScheduleAction.BACKFILL):
            for caller in (bearer(Right.PRODUCE), bearer(Right.SCHEDULE), other, bearer(Right.ADMIN)):
                answer = await ask(link, action, caller=caller)
                assert answer.status == Status.FORBIDDEN.code, (action, caller)
        assert (await ask(link, ScheduleAction.PAUSE, caller=both)).status == Status.OK.code


async def test_the_template_is_shown_to_those_who_may_read_payloads() -> None:
    async with broker() as link:
        await create(link, every_ms=60_000, payload="aGk=", headers={"a": "b"})
        for caller, sees in (
            (bearer(Right.CONSUME), True),
            (bearer(Right.SCHEDULE), True),
            (bearer(Right.OPERATOR), True),
            (bearer(Right.PRODUCE), False),
        ):
            found = shown(await ask(link, ScheduleAction.GET, caller=caller))
            assert ("payload" in found, "headers" in found) == (sees, sees)
            assert found["every_ms"] == 60_000
        nothing = await ask(link, ScheduleAction.GET, caller=bearer(Right.CONSUME, topics=("other",)))
        assert nothing.status == Status.FORBIDDEN.code
        assert (await ask(link, ScheduleAction.LIST, "", "", caller=bearer(Right.CONSUME, topics=("x",)))).body == "[]"


@pytest.mark.slow
async def test_schedules_are_listed_page_by_page() -> None:
    async with broker() as link:
        await link.topic(TopicAction.CREATE, "u")
        for number in range(25):
            await create(link, f"s{number}", "t" if number % 2 else "u", every_ms=3_600_000, start_ms=FAR_MS)
        await ask(link, ScheduleAction.DELETE, "s24", "u")
        for topic, expected in (("", 24), ("t", 12), ("u", 12)):
            names: list[str] = []
            cursor = b""
            while True:
                answer = await ask(link, ScheduleAction.LIST, "", topic, cursor=cursor, limit=5)
                page = [] if answer.body == "[]" else [one["name"] for one in json.loads(answer.body)]
                assert len(page) <= 5
                names += page
                cursor = answer.cursor
                if not cursor:
                    break
            assert len(names) == len(set(names)) == expected
        with_bad = await ask(link, ScheduleAction.LIST, "", "", cursor=b"nonsense")
        assert with_bad.status == Status.INVALID.code


async def test_bad_input_gets_a_sentence_that_names_the_field() -> None:
    async with broker() as link:
        for body, said in (
            ("", "the body must be JSON"),
            ("[]", "must be an object of JSON"),
            ({"every_ms": 1}, "every must be at least 1s"),
            ({"cron": ["x"]}, "cron"),
            ({"evry_ms": 1}, "a schedule has no field 'evry_ms'"),
            ({"every_ms": 1_000, "tag": "a\0b"}, "tag must have no NUL"),
            ({"every_ms": 1_000, "name": "other"}, "name is 'other' in the specification and 's' in the call"),
            ({"every_ms": 1_000, "zone": "Mars"}, "no time zone 'Mars'"),
        ):
            answer = await ask(link, ScheduleAction.CREATE, body=body)
            assert (answer.status, said in answer.detail) == (Status.INVALID.code, True), answer.detail
        for name, topic in (("a b", "t"), ("s", "~schedules"), ("", "t")):
            answer = await ask(link, ScheduleAction.CREATE, name, topic, body={"every_ms": 1_000})
            assert answer.status in (Status.INVALID.code, Status.FORBIDDEN.code)
            assert answer.detail
        assert (await ask(link, ScheduleAction.UPDATE, body={})).status == Status.INVALID.code
        large = await ask(link, ScheduleAction.CREATE, body={"every_ms": 1_000, "payload": "A" * 4_000_000})
        assert large.status == Status.TOO_LARGE.code
        grown = {"every_ms": 1_000, "headers": {"h": "{occurrence}" * 600}}
        for action in (ScheduleAction.CREATE, ScheduleAction.UPDATE):
            large = await ask(link, action, body=grown)
            assert large.status == Status.TOO_LARGE.code, large.detail
            assert "headers take 12005 bytes once they are filled in" in large.detail
            if action is ScheduleAction.CREATE:
                await create(link, every_ms=3_600_000)


async def test_a_schedule_that_its_topic_has_become_too_small_for_is_still_paused_and_changed() -> None:
    async with broker("memory://") as link:
        await create(link, every_ms=3_600_000, payload="A" * 40)
        await link.topic(TopicAction.UPDATE, max_payload_bytes=1)
        for action in (ScheduleAction.PAUSE, ScheduleAction.RESUME):
            assert (await ask(link, action)).status == Status.OK.code
        assert (await ask(link, ScheduleAction.UPDATE, body={"tag": "monthly"})).status == Status.OK.code
        large = await ask(link, ScheduleAction.UPDATE, body={"payload": "A" * 8})
        assert (large.status, "takes up to 1" in large.detail) == (Status.TOO_LARGE.code, True)
