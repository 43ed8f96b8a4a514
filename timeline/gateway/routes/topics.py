"""Topics: list, show, create, change and drop."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, delete, get, patch, post, put

from timeline.driver.queries import DURATIONS, PERCENTS
from timeline.driver.times import iso_or_none
from timeline.errors import NotFound
from timeline.gateway.clients import CallerClient
from timeline.gateway.problems import documented
from timeline.gateway.shapes import NewTopic, TopicAnswer, TopicAnswers, TopicSecret
from timeline.gateway.values import length, text_of
from timeline.model import Status, Topic, TopicSettings, check_topic_name
from timeline.wording import no_such_topic, typed_value


@get("/topics", operation_id="listTopics", summary="List all topics", responses=documented())
async def list_(client: CallerClient) -> TopicAnswers:
    """Return all topics with their settings, by name."""
    return TopicAnswers([topic_answer(each) for each in await client.timeline.topics()])


def topic_answer(each: Topic) -> TopicAnswer:
    """Return a topic for an answer."""
    return TopicAnswer(each.name, each.settings, each.revision, iso_or_none(each.created_ms), str(each.uid))


@get("/topics/{topic:str}", operation_id="showTopic", summary="Show a topic", responses=documented(Status.NOT_FOUND))
async def show(client: CallerClient, topic: str) -> TopicAnswer:
    """Return a topic with its settings."""
    name = check_topic_name(text_of(topic))
    for each in await client.timeline.topics():
        if each.name == name:
            return topic_answer(each)
    raise NotFound(no_such_topic(name))


@put(
    "/topics/{topic:str}",
    operation_id="createTopic",
    summary="Create a topic",
    status_code=201,
    responses=documented(Status.EXISTS),
)
async def create(client: CallerClient, topic: str, data: NewTopic | None = None) -> Response[TopicAnswer]:
    """Create a topic: 201. One with the same settings that is there already answers 200, other settings 409.
    So it needs no `Idempotency-Key`."""
    name = text_of(topic)
    stood = {each.uid for each in await client.timeline.topics()}
    made = await client.timeline.create_topic(name, **_settings(data or NewTopic()))
    return Response(topic_answer(made), status_code=200 if made.uid in stood else 201)


@patch(
    "/topics/{topic:str}",
    operation_id="updateTopic",
    summary="Change settings of a topic",
    responses=documented(Status.NOT_FOUND, Status.EXISTS),
)
async def update(client: CallerClient, topic: str, data: NewTopic) -> TopicAnswer:
    """Change settings while the topic is used. Null sets one back to its default. `buckets` and `kind` are fixed. It
    needs no `Idempotency-Key`: a repeat changes nothing, and gets the same answer."""
    return topic_answer(await client.timeline.update_topic(text_of(topic), **_settings(data)))


@delete(
    "/topics/{topic:str}",
    operation_id="dropTopic",
    summary="Drop a topic and all its messages",
    status_code=204,
    responses=documented(Status.NOT_FOUND),
)
async def drop(client: CallerClient, topic: str) -> None:
    """Delete a topic and all its messages, for good. It needs no `Idempotency-Key`: a repeat answers 404."""
    await client.timeline.drop_topic(text_of(topic))


@post(
    "/topics/{topic:str}/secret:rotate",
    operation_id="rotateSecret",
    summary="Make a new secret of webhooks",
    status_code=200,
    responses=documented(Status.NOT_FOUND, Status.EXISTS),
)
async def rotate(client: CallerClient, topic: str) -> TopicSecret:
    """Make a new secret with which the topic's webhooks are signed, and show it. For a day, each request has a
    signature by the former one, too. A second call ends the former one at once. It takes the right admin. It needs no
    `Idempotency-Key`: after a lost answer, call it again, and give receivers the secret of that answer at once."""
    name = check_topic_name(text_of(topic))
    newest, *_ = await client.timeline.topic_secrets(name, rotate=True)
    return TopicSecret(name, newest)


def _settings(asked: NewTopic) -> dict[str, Any]:
    """Return settings as the driver takes them."""
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not msgspec.UNSET}
    given = {name: _default(name) if value is None else value for name, value in given.items()}
    return {
        name: length(value, name) if name in DURATIONS and value != "auto" else value for name, value in given.items()
    }


def _default(name: str) -> Any:
    """Return what a setting is if nobody says otherwise, as callers write it."""
    field = DURATIONS.get(name) or PERCENTS.get(name) or name
    value = getattr(TopicSettings(), field)
    if name in DURATIONS:
        return typed_value(field, value)
    return value / 100 if name in PERCENTS else value
