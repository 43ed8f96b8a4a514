"""The recurring schedules of a backup: `schedules.json` beside the messages, with its checksum in the manifest.

A restored schedule goes on from the time of the restore. Its state of then stays in the backup, for people.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from timeline.driver.schedules import Schedule
from timeline.driver.times import as_datetime
from timeline.errors import Forbidden, Invalid
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.files import joined, read_json, write_json
from timeline.schedules import Specification
from timeline.storage_plugins import shown
from timeline.wire import Fault, TransportError

EXISTING = ("refuse", "replace", "keep", "skip")
FILE = "schedules.json"
MOST_NAMED = 20


@dataclass
class RestoredSchedules:
    """What became of a backup's schedules, or with a dry run would: names by what was done."""

    created: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return how many of each."""
        return {one.name: len(getattr(self, one.name)) for one in dataclasses.fields(self)}


def save_schedules(connection: SparkConnection, topic: str, url: str) -> tuple[int, str]:
    """Write the topic's schedules below `url`, if an earlier run has not. Return their number, and the checksum. Raise
    Forbidden for a token that may not see their payloads."""
    place = joined(url, FILE)
    told = read_json(place)
    if told is None:
        schedules = standing_schedules(connection, topic).values()
        hidden = [one.name for one in schedules if not one.payload_shown]
        if hidden:
            raise Forbidden(
                f"the token may not see the payload of the schedule {hidden[0]!r}: a backup needs the right consume, "
                f"schedule or operator on {topic!r}"
            )
        told = {"schedules": [_saved(one) for one in sorted(schedules, key=lambda one: one.name)]}
        write_json(place, told)
    if not isinstance(told, dict) or not isinstance(told.get("schedules"), list):
        raise Invalid(f"{shown(place)} has something else than schedules: name another place for the backup")
    return len(told["schedules"]), checksum(told)


def _saved(one: Schedule) -> dict[str, Any]:
    return {
        "specification": one.specification.to_json(),
        "revision": one.revision,
        "state": dataclasses.asdict(one.state),
    }


def checksum(told: Any) -> str:
    """Return the checksum of the content of a backup's schedules."""
    said = json.dumps(told, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(said.encode()).hexdigest()


def saved_schedules(url: str, count: int, expected: str) -> list[Specification]:
    """Return the schedules of the backup at `url`. Raise Invalid if they are not those of its manifest."""
    if not expected:
        return []  # of a Timeline that knew no schedules
    told = read_json(joined(url, FILE))
    if told is None or checksum(told) != expected or len(told["schedules"]) != count:
        raise Invalid(f"{FILE} of {shown(url)} is not what its manifest says. The backup was changed or is damaged")
    return [Specification.from_json(one["specification"]) for one in told["schedules"]]


def plan_schedules(
    connection: SparkConnection, topic: str, saved: list[Specification], existing: str
) -> RestoredSchedules:
    """Return what a restore does with these schedules on `topic`; empty: it is not there yet. Raise Invalid if some
    differ from those that stand there and `existing` is "refuse"."""
    plan = RestoredSchedules()
    if existing == "skip":
        return plan
    standing = standing_schedules(connection, topic) if topic else {}
    differing: list[str] = []
    for one in saved:
        other = standing.get(one.name)
        if other is None:
            plan.created.append(one.name)
        elif dataclasses.replace(one, topic=topic) == other.specification:
            plan.there.append(one.name)
        else:
            differing.append(one.name)
    if differing and existing == "refuse":
        named = ", ".join(map(repr, differing[:MOST_NAMED]))
        raise Invalid(
            f"{len(differing):,} schedules of {topic!r} differ from those of the backup: {named}. Restore them as they "
            "were (--schedules replace), leave them as they are (--schedules keep), or restore none (--schedules skip)"
        )
    (plan.replaced if existing == "replace" else plan.kept).extend(differing)
    return plan


def restore_schedules(
    connection: SparkConnection, topic: str, saved: list[Specification], plan: RestoredSchedules
) -> None:
    """Do what `plan` says."""
    by_name = {one.name: one for one in saved}
    client = connection.client
    for name in plan.created:
        connection.run(client.create_schedule(dataclasses.replace(by_name[name], topic=topic)))
    standing = standing_schedules(connection, topic) if plan.replaced else {}
    for name in plan.replaced:
        connection.run(standing[name].update(**_arguments(by_name[name])))


def standing_schedules(connection: SparkConnection, topic: str) -> dict[str, Schedule]:
    """Return the schedules of `topic`, by name. Brokers of an older version have none."""
    try:
        return {one.name: one for one in connection.iterate(connection.client.schedules(topic))}
    except Invalid as refused:
        if not _is_too_old(refused):
            raise
        return {}


def _is_too_old(error: BaseException | None) -> bool:
    """Return whether a call failed because the broker does not know it."""
    while error is not None:
        if isinstance(error, TransportError) and error.fault is Fault.WRONG_VERSION:
            return True
        error = error.__cause__
    return False


def _arguments(one: Specification) -> dict[str, Any]:
    """Return a specification as the arguments of `tl.schedule`."""
    says = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    for name in ("topic", "name"):
        del says[name]
    for name in ("every", "jitter", "window", "expires"):
        says[name] = f"{says.pop(f'{name}_ms')}ms"
    for name in ("start", "end"):
        at_ms = says.pop(f"{name}_ms")
        says[name] = as_datetime(at_ms) if at_ms else None
    return says
