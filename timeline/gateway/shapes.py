"""The shapes of the API: each body, answer and line, declared once. The OpenAPI document is made from them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from timeline.driver.brokers import BrokerStanding
from timeline.model import DEFAULT_GROUP, Status, TopicSettings

_TIME = Meta(
    description="A time: RFC 3339 with an offset, or milliseconds since 1970 UTC.", examples=["2030-01-01T09:00:00Z"]
)
_DURATION = Meta(
    description='A duration: "250ms", "30s", "15m", "2h", "10d", or seconds as a number.', examples=["15m"]
)
When = Annotated[str | int | None, _TIME]
Moment = Annotated[str | int | UnsetType | None, _TIME]
Length = Annotated[str | int | float | None, _DURATION]
Span = Annotated[str | int | float | UnsetType | None, _DURATION]
Lease = Annotated[str | int | float | None, Meta(description="How long the lease lasts from now.", examples=["30s"])]
Headers = Annotated[
    Raw | UnsetType,
    Meta(
        extra_json_schema={
            "anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}],
            "default": None,
        }
    ),
]
"""Read only if they are short: a body of nothing else would take much memory."""
IfExists = Literal["move", "replace"]


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """A body that a caller sends. Unknown fields are refused."""


class NewMessage(Asked):
    """One message to put. Give one of `payload`, `payload_text` and `payload_base64`, and one of `at` and `in`."""

    id: Annotated[
        str | None, Meta(description="1 to 255 bytes of UTF-8, unique in its topic. Default: one is made.")
    ] = None
    payload: Annotated[Raw | UnsetType, Meta(description="Any JSON value. It comes back as JSON.")] = UNSET
    payload_text: str | None = None
    payload_base64: str | None = None
    at: When = None
    in_: Length = field(default=None, name="in")
    tag: Annotated[str | None, Meta(description="At most 64 bytes. Bulk calls select by it.")] = None
    headers: Headers = UNSET
    expires: Annotated[
        str | int | None, Meta(description="A time, or a duration from now. The message is not delivered after it.")
    ] = None
    group: Annotated[str, Meta(description="Producer group that owns the message.")] = DEFAULT_GROUP
    if_exists: Annotated[IfExists | None, Meta(description="What to do with another message of the same id.")] = None


class PutAnswer(Struct, kw_only=True, omit_defaults=True):
    """The result for one message."""

    id: str
    status: Status
    version: int = field(default=-1)
    due: str | None = None
    settled: bool = False
    moved: bool = False
    detail: str = ""


class PutAnswers(Struct):
    """One answer for each message, in the order of the call."""

    results: list[PutAnswer]


class LineAnswer(PutAnswer, kw_only=True, omit_defaults=True):
    """The result for one line of a stream. Lines count from 1, blank ones too."""

    line: int = 0


class BulkAnswer(Struct, kw_only=True, omit_defaults=True):
    """The end of a stream of messages: how many have each status, and the first failures, each with its line.
    `stopped`: the line at which the stream broke off, and why. Neither it nor any after it was put."""

    counts: dict[str, int]
    failed: list[LineAnswer]
    failed_omitted: int
    stopped: LineAnswer | None = None


class MoveMessage(Asked):
    """Where to: `at`, or `in` from now. `if_version`: only if the message has that version."""

    at: When = None
    in_: Length = field(default=None, name="in")
    if_version: int | None = None
    group: str = DEFAULT_GROUP


class MoveTag(Asked):
    """Where to: `at`, `in` from now, or `by`, which shifts each message and may be negative."""

    at: When = None
    in_: Length = field(default=None, name="in")
    by: Length = None
    group: str = DEFAULT_GROUP
    resume: str | None = None


class TagAnswer(Struct, kw_only=True):
    """How far a call by tag came. `resume` continues it; null at the end."""

    matched: int
    dry_run: bool
    counts: dict[str, int]
    changed: int
    finished: bool
    resume: str | None


MOST_AT_ONCE = 10_000
"""Receipts or ids of one call. Each has an answer of its own."""
Receipts = Annotated[list[str], Meta(max_length=MOST_AT_ONCE)]


class Leasing(Asked):
    """How many messages to take, how long to wait for the first, and how long each is leased."""

    max: Annotated[int, Meta(description="The most messages.")] = 10
    wait: Annotated[str | int | float, Meta(description="How long to wait for the first one.")] = "20s"
    lease: Lease = None
    max_bytes: int | None = None


class LeasedMessage(Struct, kw_only=True, omit_defaults=True):
    """A message that the caller has until `lease_until`. Its receipt settles it. `retry_in_ms`: how long the topic's
    retry settings let it wait if it is released now. `max_deliveries`: of the topic; 0: no limit."""

    id: str
    receipt: str
    headers: dict[str, str]
    tag: str | None
    due: str
    scheduled: str
    deliveries: int
    lateness_ms: int
    lease_until: str
    retry_in_ms: int
    max_deliveries: int
    payload: Raw | UnsetType = UNSET
    payload_text: str | None = None
    payload_base64: str | None = None


class Leases(Struct):
    """Messages that were leased. None came due if it is empty."""

    messages: list[LeasedMessage]


class AckLeases(Asked):
    """The receipts of messages that are done."""

    receipts: Receipts


class ExtendLeases(Asked):
    """The receipts of messages that stay leased for `lease` from now."""

    receipts: Receipts
    lease: str | int | float


class ReleaseLeases(Asked):
    """The receipts of messages that are due again: at once, after `in`, or `at` a time."""

    receipts: Receipts
    at: When = None
    in_: Length = field(default=None, name="in")
    reason: str = ""


class BuryLeases(Asked):
    """The receipts of messages that become dead letters, with a reason."""

    receipts: Receipts
    reason: str


class SettledMessage(Struct, kw_only=True, omit_defaults=True):
    """The result for one receipt."""

    id: str
    status: Status
    detail: str = ""


class SettleAnswers(Struct):
    """One answer for each receipt, in order."""

    results: list[SettledMessage]


class Stored(Struct, kw_only=True, omit_defaults=True):
    """A message as stored. Times that it has not are null."""

    id: str
    state: str
    due: str | None
    scheduled: str | None
    version: int
    deliveries: int
    group: str
    holder: str | None
    tag: str | None
    expires: str | None
    died: str | None
    reason: str | None
    headers: dict[str, str] | None = None
    payload: Raw | UnsetType = UNSET
    payload_text: str | None = None
    payload_base64: str | None = None


class StoredMessages(Struct):
    """One page of a list, in no order. `cursor` gets the next one; null at the end."""

    messages: list[Stored]
    cursor: str | None


class LateMessage(Struct, kw_only=True):
    """A delivery that was more than 50 ms late, or a due message that nobody has."""

    topic: str
    id: str
    consumer: str | None
    due: str
    delivered: str
    late_ms: int
    cause: str
    why: str
    advice: str


class LateMessages(Struct):
    """Late deliveries, the oldest first. `unreachable`: brokers whose part is missing."""

    deliveries: list[LateMessage]
    causes: dict[str, int]
    dropped: int
    unreachable: list[str]


class WhyAnswer(Struct, kw_only=True):
    """Why a message was late, or what it waits for. `text` says it in sentences."""

    topic: str
    id: str
    text: list[str]
    late: list[LateMessage]
    kept: LateMessage | None
    message: Stored | None
    unreachable: list[str]


class ForecastStep(Struct):
    """How many messages come due from `start` to `end`, excluded."""

    start: str
    end: str
    count: int


class ForecastAnswer(Struct, kw_only=True):
    """What comes due within the window. `overdue`: due before it. `exact`: false if the store estimates."""

    topic: str
    total: int
    overdue: int
    exact: bool
    steps: list[ForecastStep]


class DeadLetters(Asked):
    """Which dead letters: `ids`, all of a `tag`, or `all` of the group. Revive: when they are due; default: now."""

    ids: Annotated[list[str], Meta(max_length=MOST_AT_ONCE)] | None = None
    tag: str | None = None
    all: bool = False
    group: str = DEFAULT_GROUP


class ReviveLetters(DeadLetters):
    """Which dead letters, and when they are due again. Default: now."""

    at: When = None
    in_: Length = field(default=None, name="in")


class LettersAnswer(Struct, kw_only=True):
    """How many letters have each status. `results`: of all `ids`; else the first failures. `stopped`: why it broke off
    after some letters. The same call goes on with the others."""

    counts: dict[str, int]
    results: list[PutAnswer]
    omitted: int
    stopped: str | None = None


class NewTopic(Asked):
    """Settings of a topic. Durations are texts, such as "30s", or seconds. Null: as by default."""

    lease: Span = UNSET
    max_lease: Span = UNSET
    max_payload_bytes: int | UnsetType | None = UNSET
    horizon: Span = UNSET
    max_deliveries: int | UnsetType | None = UNSET
    redelivery_backoff: Span = UNSET
    dead_retention: Span = UNSET
    remember: Span = UNSET
    lease_ahead: Span = UNSET
    max_rate_per_s: int | UnsetType | None = UNSET
    paused: bool | UnsetType | None = UNSET
    buckets: int | UnsetType | None = UNSET
    kind: str | UnsetType | None = UNSET
    retry_first: Span = UNSET
    retry_factor: float | UnsetType | None = UNSET
    retry_cap: Span = UNSET
    retry_jitter: float | UnsetType | None = UNSET
    push_url: Annotated[
        str | UnsetType | None, Meta(description="Webhooks go there. Empty: none. It takes the right admin.")
    ] = UNSET
    push_timeout: Span = UNSET
    push_concurrency: int | UnsetType | None = UNSET
    push_rate: int | UnsetType | None = UNSET


class TopicAnswer(Struct):
    """A topic with its settings. Durations are milliseconds, as their names say."""

    name: str
    settings: TopicSettings
    revision: int
    created: str | None
    uid: str


class TopicSecret(Struct):
    """The newest secret with which the webhooks of a topic are signed. Nobody is shown it again."""

    name: str
    secret: str


class TopicAnswers(Struct):
    """All topics, by name."""

    topics: list[TopicAnswer]


class ClusterAnswer(Struct):
    """The status of all brokers. `unreachable`: addresses that did not answer, with the reason."""

    brokers: list[BrokerStanding]
    unreachable: dict[str, str]


class Problem(Struct, kw_only=True, omit_defaults=True):
    """Why a call failed, and what to do. `code` is for programs, `detail` for people."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    id: str | None = None
    resume: str | None = None


Texts = Annotated[str | list[str] | UnsetType | None, Meta(description="One, or a list of several.")]


class Rules(Asked):
    """When something recurs. Give at least one of `cron`, `every` and `rrule`. The times of several are joined."""

    cron: Annotated[
        Texts,
        Meta(
            description="Cron expressions on the zone's clock, one or a list: minute, hour, day of the month, month, "
            "day of the week. A sixth field in front is the second.",
            examples=["0 9 * * 1-5"],
        ),
    ] = UNSET
    every: Annotated[
        Span, Meta(description="A period, counted from `start`, or else from 1970. At least 1 s.", examples=["15m"])
    ] = UNSET
    rrule: Annotated[
        Texts, Meta(description="Rules of RFC 5545, one or a list.", examples=["FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17"])
    ] = UNSET
    exclude: Annotated[
        Texts,
        Meta(
            description="What is left out: a date, a time in the zone or with an offset, or a rule: `cron:…`, "
            "`rrule:…`. One or a list.",
            examples=["2026-12-25"],
        ),
    ] = UNSET
    start: Annotated[Moment, Meta(description="No occurrence lies before it.")] = UNSET
    end: Annotated[Moment, Meta(description="No occurrence lies at it or after it.")] = UNSET
    count: Annotated[int | UnsetType | None, Meta(description="The most occurrences, from `start` on.")] = UNSET
    zone: Annotated[
        str | UnsetType | None, Meta(description="IANA zone of the rules. Default: UTC.", examples=["Europe/Berlin"])
    ] = UNSET
    gap: Annotated[
        Literal["later", "skip"] | UnsetType | None,
        Meta(description="A time that clocks skip: later by the gap, or left out. Default: by the rule."),
    ] = UNSET
    fold: Annotated[
        Literal["first", "second", "both"] | UnsetType | None,
        Meta(description="Which one counts of a time that clocks show twice. Default: by the rule."),
    ] = UNSET


class PreviewRules(Rules):
    """Rules whose times are shown. Nothing is scheduled. `from`: default: now. `limit`: how many times."""

    from_: Annotated[When, Meta(description="Show times at it and after it. Default: now.")] = field(
        default=None, name="from"
    )
    limit: int = 10


class RecurringTime(Struct):
    """A time that a rule gives. `local`: on the clock of the rule's zone. `clocks`: whether a change of clocks concerns
    it. `skipped`: clocks skip the rule's time, so it is later. `first` or `second`: clocks show it twice."""

    at: str
    local: str
    clocks: Literal["", "skipped", "first", "second"]


class PreviewAnswer(Struct):
    """The times that rules give. `words`: the rules in English."""

    words: str
    times: list[RecurringTime]


Pending = Literal["cancel", "keep"]
CatchUpName = Literal["none", "latest", "all"]
OverlapName = Literal["allow", "skip", "queue"]


class ScheduleFields(Rules):
    """When something recurs, and the message of each occurrence. A field that is null has its default."""

    jitter: Annotated[
        Span, Meta(description="Each occurrence is due later by a part of it, always by the same. Default: 0.")
    ] = UNSET
    catch_up: Annotated[
        CatchUpName | UnsetType | None,
        Meta(description="Missed occurrences that are produced late. Default: latest."),
    ] = UNSET
    window: Annotated[Span, Meta(description="Occurrences missed by more are left out. Default: 1h.")] = UNSET
    overlap: Annotated[
        OverlapName | UnsetType | None,
        Meta(description="What to do while the occurrence before is not done. Default: allow."),
    ] = UNSET
    payload: Annotated[
        Raw | UnsetType,
        Meta(description="Any JSON value. Texts in it may have {occurrence} and {sequence}, which are filled in."),
    ] = UNSET
    payload_text: str | None = None
    payload_base64: str | None = None
    headers: Headers = UNSET
    tag: Annotated[str | UnsetType | None, Meta(description="At most 64 bytes. Bulk calls select by it.")] = UNSET
    group: Annotated[
        str | UnsetType | None, Meta(description="Producer group that owns the occurrences. Default: default.")
    ] = UNSET
    expires: Annotated[
        Span, Meta(description="How long after its time an occurrence is worth delivering. Default: for ever.")
    ] = UNSET
    paused: Annotated[bool | UnsetType | None, Meta(description="Whether it produces nothing. Default: false.")] = UNSET


class NewSchedule(ScheduleFields, kw_only=True):
    """A schedule to create."""

    name: Annotated[str, Meta(description="1 to 100 letters, digits and . _ -, unique in its topic.")]


class ReplaceSchedule(ScheduleFields):
    """A whole schedule. Fields that are left out have their defaults."""


class ChangeSchedule(ScheduleFields):
    """Fields of a schedule to change. Those that are left out stay."""


class ScheduleProgress(Struct, kw_only=True):
    """How far a schedule has come. Counts are of occurrences. `sequence`: decided ones, of which `produced` were
    produced; `caught_up` of these late, after an outage. `missed`: left out for an outage. `skipped`: left out because
    the one before was not done. `failed`: refused by the topic. `position`: the first time that is not decided yet.
    `last`: the time of the last one that was produced, with `last_id`, at `last_put`."""

    created: str
    edited: str
    position: str | None
    sequence: int
    produced: int
    caught_up: int
    missed: int
    skipped: int
    failed: int
    last: str | None
    last_id: str | None
    last_put: str | None


class StoredSchedule(Struct, kw_only=True, omit_defaults=True):
    """A schedule as it stands. `words`: its rules in English. `status`: `waiting` for the occurrence before to be done.
    `next`: the next time. `warnings`: what is wrong with it. The payload is there for those who may see it."""

    topic: str
    name: str
    words: str
    cron: list[str]
    every: str | None
    rrule: list[str]
    exclude: list[str]
    start: str | None
    end: str | None
    count: int | None
    zone: str
    gap: str | None
    fold: str | None
    jitter: str
    catch_up: CatchUpName
    window: str
    overlap: OverlapName
    headers: dict[str, str]
    tag: str | None
    group: str
    expires: str | None
    paused: bool
    revision: int
    status: Annotated[str, Meta(extra_json_schema={"enum": ["active", "paused", "waiting", "ended"]})]
    state: ScheduleProgress
    next: str | None
    warnings: list[str]
    payload: Raw | UnsetType = UNSET
    payload_text: str | None = None
    payload_base64: str | None = None


class StoredSchedules(Struct):
    """One page of a list. `cursor` gets the next one; null at the end."""

    schedules: list[StoredSchedule]
    cursor: str | None


class NextTimes(Struct):
    """The next times of a schedule. None: it has ended."""

    times: list[RecurringTime]


class TriggerTime(Asked):
    """`at`: the time that stands in the message's id and for `{occurrence}`, within a day of now. Default: now."""

    at: When = None


class BackfillRange(Asked, kw_only=True):
    """The range whose occurrences are produced: from `from`, and before `to`. Those ahead are left out."""

    from_: Annotated[str | int, Meta(description="A time: RFC 3339 with an offset, or milliseconds.")] = field(
        name="from"
    )
    to: Annotated[str | int, Meta(description="A later time.")]


class BackfillAnswer(Struct, kw_only=True):
    """How many occurrences of the range were produced, or would be. `present`: produced before. `failed`: refused by
    the topic."""

    produced: int
    present: int
    failed: int
    dry_run: bool
