"""Calls about schedules, in frames, to a broker in this process."""

from __future__ import annotations

import json
from typing import Any

from tests.broker.link import Link
from timeline.broker.api.access import ANYBODY, Principal
from timeline.model import Status
from timeline.wire import ScheduleAction, ScheduleAnswer, ScheduleCall, decode_as, encode


async def ask(
    link: Link, action: ScheduleAction, name: str = "s", topic: str = "t", caller: Principal = ANYBODY, **more: Any
) -> ScheduleAnswer:
    """What the broker answers. `body` may be a dict."""
    if isinstance(more.get("body"), dict):
        more["body"] = json.dumps(more["body"])
    data = encode(ScheduleCall(action, topic, name, **more))
    return decode_as(await link.node.service.unary("Schedules", data, caller), ScheduleAnswer)


FAR_MS = 4_000_000_000_000
"""When a schedule begins that produces nothing during a test, even if a day or an hour begins meanwhile."""


async def create(link: Link, name: str = "s", topic: str = "t", **said: Any) -> ScheduleAnswer:
    """A schedule, which must be created."""
    answer = await ask(link, ScheduleAction.CREATE, name, topic, body=said or {"every_ms": 1_000})
    assert answer.status == Status.OK.code, answer.detail
    return answer


def shown(answer: ScheduleAnswer) -> dict[str, Any]:
    """The one schedule of an answer."""
    assert answer.status in (Status.OK.code, Status.DUPLICATE.code, Status.EXISTS.code), answer.detail
    (one,) = json.loads(answer.body)
    return dict(one)
