"""The rules of topic records, the same in every store: what a create or update meets, and what may not change."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

from timeline.errors import Invalid
from timeline.model import FIXED_SETTINGS, Answers, PushSecret, Status, Topic, TopicSettings
from timeline.storage_plugins.contract import StoreRefused, TopicConflict

SECRETS = "push_secrets"
"""Their name beside the settings in a record."""


def settings_record(topic: Topic) -> dict[str, Any]:
    """Return the settings as a record keeps them, unknown ones too. So a broker that does not know a setting does not
    lose it when it changes another."""
    kept = {SECRETS: [list(each) for each in topic.secrets]} if topic.secrets else {}
    return {**dataclasses.asdict(topic.settings), **kept, **json.loads(topic.newer or "{}")}


def settings_text(topic: Topic) -> str:
    """Return the settings as JSON, as a record keeps them."""
    return json.dumps(settings_record(topic), sort_keys=True)


def topic_of(uid: int, name: str | bytes, settings: str | bytes, revision: int, created_ms: int) -> Topic:
    """Return a topic from its record. Raise StoreRefused (see `read_settings`)."""
    name = name if isinstance(name, str) else name.decode()
    read = read_settings(name, settings if isinstance(settings, str) else settings.decode())
    return Topic(name, uid, read[0], revision, created_ms, *read[1:])


def same_settings(standing: Topic, asked: Topic) -> Topic:
    """Return `standing` when `asked` has the same settings; else raise TopicConflict, which names the difference."""
    ours, theirs = dataclasses.asdict(standing.settings), dataclasses.asdict(asked.settings)
    differing = [f"{name} is {ours[name]!r}, not {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]
    if differing:
        raise TopicConflict(f"topic {asked.name!r} exists with other settings: {'; '.join(differing)}", id=asked.name)
    return standing


def check_update(standing: Topic | None, asked: Topic) -> Topic:
    """Return the record to store for an update of `standing` by `asked`: revision + 1. Raise TopicConflict when it is
    gone or changed since it was read, or when a fixed setting would change."""
    if standing is None or standing.uid != asked.uid:
        raise TopicConflict(f"topic {asked.name!r} is gone: somebody dropped it since it was read", id=asked.name)
    if standing.revision != asked.revision:
        raise TopicConflict(
            f"topic {asked.name!r} has revision {standing.revision}, not {asked.revision}: "
            "somebody changed it since it was read; read it again",
            id=asked.name,
        )
    for name in FIXED_SETTINGS:
        if getattr(standing.settings, name) != getattr(asked.settings, name):
            raise TopicConflict(f"{name} of topic {asked.name!r} is fixed since its creation", id=asked.name)
    return dataclasses.replace(asked, revision=asked.revision + 1)


def read_settings(topic: str, told: object) -> tuple[TopicSettings, str, tuple[PushSecret, ...]]:
    """Return the settings of a record (JSON, or read from that), those that this version does not know
    (`Topic.newer`), and the secrets of its webhooks. Missing ones have defaults. Raise StoreRefused for impossible
    ones: somebody changed them by hand."""
    try:
        return _settings(told if isinstance(told, str) else json.dumps(told, sort_keys=True))
    except Invalid as bad:
        raise spoilt(topic, bad.reason) from bad
    except (ValueError, RecursionError) as bad:
        raise spoilt(topic, "its settings are no JSON") from bad


@lru_cache(maxsize=1024)
def _settings(told: str) -> tuple[TopicSettings, str, tuple[PushSecret, ...]]:
    """Cached: most of ten thousand topics have the same settings."""
    known = {field.name for field in dataclasses.fields(TopicSettings)}
    read = json.loads(told)
    if not isinstance(read, dict):
        raise Invalid("its settings are no object")
    settings = TopicSettings(**{name: value for name, value in read.items() if name in known}).check()
    secrets = _secrets(read.get(SECRETS, []))
    newer = {name: value for name, value in read.items() if name not in known and name != SECRETS}
    return settings, json.dumps(newer, sort_keys=True) if newer else "", secrets


def _secrets(told: Any) -> tuple[PushSecret, ...]:
    try:
        return tuple(PushSecret(str(secret), int(until_ms)) for secret, until_ms in told)
    except (TypeError, ValueError):
        raise Invalid(f"its {SECRETS} are no list of secrets with their ends") from None  # the cause would show them


def spoilt(topic: str, why: str) -> StoreRefused:
    """Return the error for the record of a topic that cannot be read."""
    of = f"of topic {topic!r:.80}" if topic else "of a topic"
    return StoreRefused(
        f"the record {of} in the store is spoilt: {why}. Set it right there, or delete that record, and begin again"
    )


def dropped(topic: Topic, count: int) -> Answers:
    """Return the answers of `count` messages whose topic was dropped."""
    answers = Answers.blank(count, Status.NOT_FOUND)
    answers.details = dict.fromkeys(range(count), f"topic {topic.name!r} was dropped")
    return answers
