"""Facts for schemathesis that the document cannot say: `SCHEMATHESIS_HOOKS=tests.gateway.clients.unsaid`.

No call and no check is left out. JSON Schema cannot say what depends on the time, on a topic, or on another field's
value. So some values come from here, and a refusal in `UNSAYABLE` is no failure.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.core import NotSet

from timeline.driver.queries import DURATIONS

DAY = timedelta(days=1)
TOPICS = ("departures", "arrivals", "gates")
NO_TOPIC = "nowhere"

_now = datetime.now(UTC)
_due = st.datetimes(
    (_now - 30 * DAY).replace(tzinfo=None), (_now + 1_000 * DAY).replace(tzinfo=None), timezones=st.just(UTC)
).map(lambda when: when.isoformat().replace("+00:00", "Z"))
_lengths = st.builds("{}{}".format, st.integers(1, 500), st.sampled_from(["ms", "s", "m", "h", "d"]))
FORMATS = {
    "date-time": _due,
    "timeline-time": _due,
    "timeline-duration": _lengths | st.sampled_from(["1h30m", "1.5s", " 2 h "]),
    "timeline-expiry": st.integers(1_001, 3_000).map("{}d".format),
    "timeline-topic": st.sampled_from(TOPICS),
    "timeline-id": st.sampled_from(["UA1545", "gate/7", "ü", "a b", "100%"]) | st.text("abc", min_size=1, max_size=9),
    "timeline-cursor": st.just(""),
    "timeline-cron": st.sampled_from(["0 9 * * 1-5", "*/15 * * * *", "30 2 L * *", "@daily", "15 0 9 * * 5#3"]),
    "timeline-rrule": st.sampled_from(["FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17", "FREQ=DAILY", "FREQ=YEARLY;BYMONTH=3"]),
    "timeline-exclude": st.sampled_from(["2030-12-25", "2030-12-25T09:00", "cron:* * 25 12 *", "rrule:FREQ=YEARLY"]),
    "timeline-schedule": st.sampled_from(["daily", "tenant-7", "a.b_c"]),
    "timeline-zone": st.sampled_from(["Europe/Berlin", "America/New_York", "UTC", "Australia/Lord_Howe"]),
}
"""Values that go together: messages are put, found and moved, and do not expire before they are due."""
for _name, _values in FORMATS.items():
    schemathesis.openapi.format(_name, _values)

UNSAYABLE = [re.compile(each) for each in (
    # Depends on the time, or on the settings of the topic.
    "^the due time lies beyond the topic's horizon", "^lease must be at most the topic's max_lease",
    "^(the message's )?expires", "^it (would|will) expire", "^a shift back must be shorter than the time since 1970",
    # JSON Schema counts the characters of a text, not its bytes. It cannot ask Unicode what is printable.
    "bytes of UTF-8 without NUL, not", "^a topic's name is 1 to 255 printable characters",
    # A pattern bounds no number, and does not say that 0us is none.
    f"^({'|'.join(DURATIONS)}) must be .* to .*, not", "must be at most 36600 days", "must be at least 1 ms",
    "must shift by at least 1 ms",
    # Compared with another value: of the call, of a setting, or of what is stored.
    "^due_from must lie before due_to", "make the step longer$", r"^\w+ \S+ is above ",
    "^say which (settings|fields) to change", "^payload takes [0-9]+ bytes; topic",
    "^the topic takes payloads of up to [0-9]+ bytes",
    "^end must be after start", "^every must be at least", "^a schedule has at most",
    "^to must be after from", "^at must be within a day of now", "^more than 10000 occurrences lie in",
    "^(jitter|window) must be 0 to",
    # Of a change: compared with the other fields of the schedule.
    "^count needs a start", "^a schedule needs a rule",
    # How a client writes a header in bytes. This one writes it in Latin-1 where it can.
    "^Timeline-[A-Za-z-]+ must be UTF-8$",
    # schemathesis makes URLs whose host is none.
    "^push_url is no URL",
    # Only the server makes a cursor. Base64 has padding, which `contentEncoding` does not promise.
    "^this is no cursor", "^payload_base64 must be base64 with padding",
)]  # fmt: skip
"""By the sentence of its answer: what may be refused, although the document allows it."""
EACH_ALONE = re.compile(r'"status":"(INVALID|TOO_LARGE)"')
"""A call of many never fails as a whole because of one. Its 207 has the refusal."""


@schemathesis.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> bytes:
    """A body of lines is sent as it is. schemathesis knows no such type."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Return whether it is a failure of the gateway."""
    if failure.code == "ST202" and response.status_code == 412:
        return False  # the version or revision that stands is not the one that was asked for
    if failure.code == "ST202" and response.status_code in (400, 413):
        detail = response.json()["detail"]
        return not any(each.search(detail) for each in UNSAYABLE)
    if failure.code == "ST201" and response.status_code == 207:
        return EACH_ALONE.search(response.text) is None
    return True


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Make a valid call one that goes well, where the document cannot say how."""
    call = case.operation.definition.raw["operationId"]
    valid = case.meta is None or case.meta.generation.mode.is_positive
    if call == "putMessages":
        _describe_payload(case, valid)
    if call == "leaseMessages" and isinstance(case.body, dict) and (valid or "wait" not in case.body):
        case.body = case.body | {"wait": "5ms"}  # a long poll waits as long as asked, which is no fault
    # A stream ends with its reader; the test of the browser reads it. In a query a number and its text look alike, so
    # that a call which is meant to be invalid may open a stream, too.
    if call == "streamMessages" and (valid or case.path_parameters.get("topic") in TOPICS):
        case.path_parameters = {"topic": NO_TOPIC}
    if not valid:
        return
    if isinstance(case.query, dict) and call == "cancelTag":
        case.query.pop("resume", None)  # only a call that broke off makes one
    if isinstance(case.body, dict):
        case.body = _body(call, case.body)


def _body(call: str, body: dict[str, Any]) -> dict[str, Any]:
    body = dict(body)
    if call == "updateTopic":
        for fixed in ("buckets", "kind"):
            body.pop(fixed, None)
    if call == "moveTag":
        body.pop("resume", None)
    for name, days in (("at", 500), ("expires", 2_000)):
        if isinstance(body.get(name), int | float):
            body[name] = int((_now + days * DAY).timestamp() * 1000)  # within the horizon
    return body


def _describe_payload(case: Any, valid: bool) -> None:
    """OpenAPI cannot say that headers go with bodies of some types, and only one of two headers."""
    case.headers = case.headers if case.headers is not None else {}
    kept = {name: value for name, value in case.headers.items() if name.lower() != "timeline-at"}
    messages = case.media_type == "application/json" and (isinstance(case.body, dict | list) or not valid)
    if messages or case.media_type == "application/x-ndjson" or isinstance(case.body, NotSet):
        kept = {name: value for name, value in kept.items() if not name.lower().startswith("timeline-")}
    else:
        kept.setdefault("Timeline-In", "1h")
    for name in [name for name in case.headers if name not in kept]:
        del case.headers[name]
    case.headers.update(kept)
