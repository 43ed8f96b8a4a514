"""An example of each answer, as the gateway gives it. Answers of one shape share it."""

from __future__ import annotations

import json
from typing import Any

from timeline.model import TopicSettings

Example = dict[str, Any]

_DUE = "2030-01-01T09:00:00.000Z"
_PUT: Example = {"id": "UA1545", "status": "OK", "version": 1, "due": _DUE}
_TAKEN: Example = {"id": "UA1546", "status": "EXISTS", "detail": "the id is taken by another message"}
_FAILED: Example = {"id": "UA1547", "status": "INVALID", "detail": "give one of payload and payload_text", "line": 2}
_LEASED: Example = {
    "id": "UA1545", "receipt": "AQdkZXBhcnR1cmVz", "headers": {"content-type": "application/json"}, "tag": "ops",
    "due": _DUE, "scheduled": _DUE, "deliveries": 1, "lateness_ms": 2, "lease_until": "2030-01-01T09:00:30.002Z",
    "retry_in_ms": 1104, "max_deliveries": 25, "payload": {"gate": "A7"},
}  # fmt: skip
_STORED: Example = {
    "id": "UA1545", "state": "waiting", "due": _DUE, "scheduled": _DUE, "version": 1, "deliveries": 0,
    "group": "default", "holder": None, "tag": "ops", "expires": None, "died": None, "reason": None,
}  # fmt: skip
_LATE: Example = {
    "topic": "departures", "id": "UA1545", "consumer": "worker-1", "due": _DUE,
    "delivered": "2030-01-01T09:00:00.214Z", "late_ms": 214, "cause": "no_consumer", "why": "no consumer was connected",
    "advice": "start a consumer",
}  # fmt: skip
_TOPIC: Example = {
    "name": "departures", "settings": {name: getattr(TopicSettings(), name) for name in TopicSettings.__slots__},
    "revision": 1, "created": "2026-11-26T20:40:01.646Z", "uid": "7848322859610833890",
}  # fmt: skip
_TIME: Example = {"at": "2026-11-27T08:00:00.000Z", "local": "2026-11-27T09:00:00+01:00", "clocks": ""}
_PROGRESS: Example = {
    "created": "2026-11-26T20:40:01.646Z", "edited": "2026-11-26T20:40:01.646Z", "position": "2026-11-27T08:00:00.000Z",
    "sequence": 12, "produced": 11, "caught_up": 1, "missed": 1, "skipped": 0, "failed": 0,
    "last": "2026-11-26T08:00:00.000Z", "last_id": "daily-report@2026-11-26T08:00:00Z",
    "last_put": "2026-11-26T07:58:00.105Z",
}  # fmt: skip
_SCHEDULE: Example = {
    "topic": "departures", "name": "daily-report", "words": "At 09:00 on Monday through Friday, in Europe/Berlin",
    "cron": ["0 9 * * 1-5"], "every": None, "rrule": [], "exclude": [], "start": None, "end": None, "count": None,
    "zone": "Europe/Berlin", "gap": None, "fold": None, "jitter": "0", "catch_up": "latest", "window": "1h",
    "overlap": "allow", "headers": {"content-type": "application/json"}, "tag": None, "group": "default",
    "expires": None, "paused": False, "revision": 1, "status": "active", "state": _PROGRESS,
    "next": "2026-11-27T08:00:00.000Z", "warnings": [], "payload": {"report": "{occurrence}"},
}  # fmt: skip
_COUNTED: Example = {"counts": {"OK": 1, "INVALID": 1}, "failed": [_FAILED], "failed_omitted": 0}

ANSWERS: dict[str, Example] = {
    "PutAnswer": _PUT,
    "PutAnswers": {"results": [_PUT, _TAKEN]},
    "LineAnswer": _PUT | {"line": 1},
    "BulkAnswer": _COUNTED,
    "TagAnswer": {
        "matched": 3, "dry_run": False, "counts": {"OK": 3}, "changed": 3, "finished": True, "resume": None,
    },
    "LeasedMessage": _LEASED,
    "Leases": {"messages": [_LEASED]},
    "SettledMessage": {"id": "UA1545", "status": "OK"},
    "SettleAnswers": {
        "results": [
            {"id": "UA1545", "status": "OK"},
            {"id": "UA1546", "status": "FENCED", "detail": "the token is stale"},
        ]
    },
    "Stored": _STORED | {"headers": {"content-type": "application/json"}, "payload": {"gate": "A7"}},
    "StoredMessages": {"messages": [_STORED], "cursor": "AAAAA2GMmH92"},
    "LateMessage": _LATE,
    "LateMessages": {"deliveries": [_LATE], "causes": {"no_consumer": 1}, "dropped": 0, "unreachable": []},
    "WhyAnswer": {
        "topic": "departures", "id": "UA1545", "text": ["now  waiting: due in 10m 0s"], "late": [], "kept": None,
        "message": _STORED, "unreachable": [],
    },
    "ForecastStep": {"start": _DUE, "end": "2030-01-01T09:01:00.000Z", "count": 120},
    "ForecastAnswer": {
        "topic": "departures", "total": 120, "overdue": 0, "exact": True,
        "steps": [{"start": _DUE, "end": "2030-01-01T09:01:00.000Z", "count": 120}],
    },
    "LettersAnswer": {"counts": {"OK": 1}, "results": [_PUT], "omitted": 0, "stopped": None},
    "TopicAnswer": _TOPIC,
    "TopicSecret": {"name": "departures", "secret": "whsec_b25seSBhbiBleGFtcGxlIG9mIGEgc2VjcmV0"},
    "TopicAnswers": {"topics": [_TOPIC]},
    "ClusterAnswer": {"brokers": [], "unreachable": {"broker-2:9000": "no answer within 2 s"}},
    "RecurringTime": _TIME,
    "PreviewAnswer": {"words": "At 09:00 on Monday through Friday, in Europe/Berlin", "times": [_TIME]},
    "ScheduleProgress": _PROGRESS,
    "StoredSchedule": _SCHEDULE,
    "StoredSchedules": {"schedules": [_SCHEDULE], "cursor": None},
    "NextTimes": {"times": [_TIME]},
    "BackfillAnswer": {"produced": 6, "present": 1, "failed": 0, "dry_run": False},
}  # fmt: skip
"""By shape."""
PUT_LINES = '{"id": "UA1545", "payload": {"gate": "A7"}, "in": "10m"}\n{"payload_text": "gate closes", "in": "15m"}\n'
ANSWER_LINES = f"{json.dumps(_PUT | {'line': 1})}\n{json.dumps(_FAILED)}\n"
PAYLOAD = "gate closes"
EVENTS = f": open\n\nevent: message\ndata: {json.dumps(_LEASED)}\n\n"


def shown(value: str) -> Example:
    """Return the examples of a body or an answer that is no JSON."""
    return {"one": {"value": value}}
