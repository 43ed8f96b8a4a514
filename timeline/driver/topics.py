"""Topics, asked for and changed: settings as a person writes them."""

from __future__ import annotations

import difflib
from typing import Any

from timeline.driver.message import encode_text
from timeline.driver.receipts import NOT_FOUND, OK, error_of
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport.channel import AttemptState
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Invalid
from timeline.model import LEASE_AHEAD_AUTO, SETTING_RANGES, Topic, check_topic_name
from timeline.wire import TopicAction, TopicList, Topics, decode_as, encode

DURATIONS = {name.removesuffix("_ms"): name for name in SETTING_RANGES if name.endswith("_ms")}
"""Settings that are durations, by the name they are given under: `lease="30s"` is `lease_ms`."""
NUMBERS = ("buckets", "max_payload_bytes", "max_deliveries", "max_rate_per_s")
NAMES = (*DURATIONS, *NUMBERS, "paused", "kind")


def settings_of(given: dict[str, Any]) -> dict[str, int | str | bool]:
    """Settings for the wire. Durations as `lease="30s"`, or in ms under their full name, `lease_ms=30_000`;
    `lease_ahead="auto"`; None is the default. Raises Invalid for a name that is none, with the nearest that is."""
    settings: dict[str, int | str | bool] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in DURATIONS and given.get(DURATIONS[name]) is not None:
            raise Invalid(f"{name} and {DURATIONS[name]} are one setting. Give one of the two")
        if name == "lease_ahead" and value == "auto":
            settings["lease_ahead_ms"] = LEASE_AHEAD_AUTO
        elif name in DURATIONS:
            settings[DURATIONS[name]] = duration_ms(value, name)
        elif name in SETTING_RANGES:
            if isinstance(value, bool) or not isinstance(value, int):
                raise Invalid(f"{name} must be a whole number, not {value!r:.60}")
            if value.bit_length() > 63:  # more than the wire can carry; for the rest the broker knows the range
                low, high = SETTING_RANGES[name]
                raise Invalid(f"{name} must be a whole number from {low} to {high}, not {str(value)[:12]}…")
            settings[name] = value
        elif name == "paused":
            if not isinstance(value, bool):
                raise Invalid(f"paused must be True or False, not {value!r:.60}")
            settings[name] = value
        elif name == "kind":
            settings[name] = encode_text(value, "kind", 255)
        else:
            near = difflib.get_close_matches(name, [*NAMES, *SETTING_RANGES], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
            raise Invalid(f"a topic has no setting {name!r}: {hint}")
    return settings


class TopicCalls:
    """The part of a client that asks for topics and changes them. See `Timeline`."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context

    async def create_topic(self, /, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """Creates a topic; one that stands with these very settings is answered as it is, with others raises Exists.

        Settings: `buckets lease max_lease max_payload_bytes horizon max_deliveries redelivery_backoff dead_retention
        remember lease_ahead paused max_rate_per_s kind`; durations like "30s".
        """
        return (await self._topics(TopicAction.CREATE, name, settings_of(settings), timeout))[0]

    async def update_topic(self, /, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """Changes settings of a topic, live; `buckets` and `kind` are fixed. Raises NotFound, Invalid."""
        if not settings:
            raise Invalid(f"say which settings to change: {', '.join(NAMES)}")
        return (await self._topics(TopicAction.UPDATE, name, settings_of(settings), timeout))[0]

    async def pause_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """Stops deliveries of a topic; puts go on, leases stay."""
        return await self.update_topic(name, timeout=timeout, paused=True)

    async def resume_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """Lets deliveries of a topic go on."""
        return await self.update_topic(name, timeout=timeout, paused=False)

    async def drop_topic(self, name: str, *, timeout: Duration | None = None) -> None:
        """Deletes a topic and all its messages. Raises NotFound when there is none."""
        await self._topics(TopicAction.DROP, name, {}, timeout)

    async def topics(self, *, timeout: Duration | None = None) -> list[Topic]:
        """All topics, by name."""
        listed = await self._topics(TopicAction.LIST, "", {}, timeout)
        return sorted(listed, key=lambda topic: topic.name)

    async def _topics(
        self, action: TopicAction, name: str, settings: dict[str, int | str | bool], timeout: Duration | None
    ) -> tuple[Topic, ...]:
        self._context.check()
        if action is not TopicAction.LIST:
            check_topic_name(name)
        frame = encode(Topics(action, name, settings))
        attempt = AttemptState()
        writes = action is not TopicAction.LIST
        data = await self._context.channel.unary(
            "Topics", frame, self._context.deadline(timeout), attempt, writes=writes
        )
        answer = decode_as(data, TopicList)
        if answer.status == OK or (action is TopicAction.DROP and attempt.unsure and answer.status == NOT_FOUND):
            return answer.topics
        raise error_of(answer.status, None, answer.detail)
