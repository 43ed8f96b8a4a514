"""The job `audit` and its page: what happened to every message, out of the journal, and whether the promises were kept.

Lateness by topic, hour and consumer; redeliveries and why; what was put and never settled; and whatever breaks a
promise of `design-docs`, by name. Where brokers dropped events, or ended without a word, the audit says from when until
when it knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.pipeline.jobs.journal import Gap, gaps, is_kind, journal, rows_of
from timeline.pipeline.jobs.page import bars, folded, lines, page, paragraph, section, table, tiles
from timeline.pipeline.jobs.stories import PROMISES, Pending, broken, is_open, judged, lives, with_tags
from timeline.pipeline.session import Progress, quiet

EXAMPLES = 20
STEPS_MS = (1_000, 10_000, 60_000, 600_000)
POINTS = 150
"""Lateness over time is drawn in the smallest of these steps that makes no more points; beyond, by hour."""
STORIES = 40
PERCENTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
ACCURACY = 10_000
LATE_MS = 50


@dataclass
class Audit:
    """What an audit found. Counts of `messages` by what happened to them (`delivered`: messages that were delivered at
    least once); `events` by kind; `lateness` by topic, hour, consumer and, of a journal of less than some days, time:
    rows of percentiles in ms; `redelivered` by
    cause; `broken`: messages by promise, with `examples`; `open`: put and never settled, `pending` of these still
    there, `unknown` of these not there, though what ended them may be missing in the journal, or not be written yet;
    `gaps`: what is missing; `silent`: topics of which the journal has no event, though they were asked for, or `*` when
    it has none of any; `unheard`: ids that were asked for, of which it has none; `ends_ms`: its last word, of whatever
    it is; `unended`: broker sessions that never said that they ended (running, or killed)."""

    since_ms: int = 0
    until_ms: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    lateness: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    histogram: list[dict[str, Any]] = field(default_factory=list)
    redelivered: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0
    pending: int | None = None
    unknown: int = 0
    gaps: list[Gap] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unheard: list[str] = field(default_factory=list)
    ends_ms: int = 0
    unended: list[str] = field(default_factory=list)
    stories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1: a promise was broken. 3: events are missing in the journal, or it has none of a topic. 0: neither."""
        return 1 if self.broken else 3 if self.gaps or self.silent else 0

    @property
    def verdict(self) -> str:
        """What to say where no promise was broken: nothing was kept where nothing was seen."""
        return "every promise was kept" if self.events else "no promise was looked at: no event was found"


def audit(
    spark: SparkSession,
    url: str,
    topics: Sequence[str] = (),
    pending: Pending | None = None,
    ids: Sequence[str] = (),
    progress: Progress = quiet,
) -> Audit:
    """Audits the journal at `url`, of `topics` (none: all). `pending`: what lies on the timelines still
    (`pending_in`), of a backup or of the brokers; without it nothing can be called lost. `ids`: whose stories to tell
    besides those that are worth it. Raises Invalid when there is no journal."""
    steps = ["reading the journal", "messages", "lateness", "promises", "stories"]
    progress(steps[0], 0, len(steps))
    everything = journal(spark, url)
    unsaid = gaps(everything, Clock().now_ms())
    found = Audit(gaps=unsaid.missing, unended=unsaid.unended)
    events = everything.where(F.col("topic").isNotNull())
    if topics:
        events = events.where(F.col("topic").isin(*topics))
    events = events.persist(StorageLevel.MEMORY_AND_DISK)
    progress(steps[1], 1, len(steps))
    _span(events, found)
    _listen(everything, events, topics, ids, found)
    until_ms = max(found.until_ms, pending.until_ms if pending is not None else 0)
    whole = judged(with_tags(lives(events, until_ms), events), pending, unsaid.spans)
    whole = whole.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        _count(events, whole, found)
        progress(steps[2], 2, len(steps))
        _measure(events, found)
        progress(steps[3], 3, len(steps))
        worth = _judge(whole, pending, found)
        progress(steps[4], 4, len(steps))
        _tell(events, whole, [*ids, *worth], found)
        progress("done", len(steps), len(steps))
    finally:
        whole.unpersist()
        events.unpersist()
    return found


def _span(events: DataFrame, found: Audit) -> None:
    span = events.agg(F.min("time").alias("a"), F.max("time").alias("b")).select(
        F.unix_millis("a").alias("a"), F.unix_millis("b").alias("b")
    ).head()  # fmt: skip
    if span is not None:
        found.since_ms, found.until_ms = span["a"] or 0, span["b"] or 0


def _listen(everything: DataFrame, events: DataFrame, topics: Sequence[str], ids: Sequence[str], found: Audit) -> None:
    """Of what was asked, that of which the journal says nothing."""
    last = everything.agg(F.unix_millis(F.max("time")).alias("ms")).head()
    found.ends_ms = (last["ms"] or 0) if last is not None else 0
    heard = {row["topic"] for row in events.select("topic").distinct().collect()} if topics else set()
    found.silent = [topic for topic in dict.fromkeys(topics) if topic not in heard]
    if not topics and not found.until_ms:
        found.silent = ["*"]
    if ids:
        told = {row["id"] for row in events.where(F.col("id").isin(*ids)).select("id").distinct().collect()}
        found.unheard = [id for id in dict.fromkeys(ids) if id not in told]


def silence(found: Audit) -> list[str]:
    """Sentences on what was asked and is not in the journal, for people."""
    ends = f"{as_datetime(found.ends_ms):%Y-%m-%d %H:%M:%S} UTC" if found.ends_ms else "no time"
    said = []
    for topic in found.silent:
        what = "of any topic" if topic == "*" else f"of the topic {topic!r}"
        said.append(
            f"the journal has no event {what}. It ends at {ends}; a broker that runs writes a file each minute (its "
            "journal's roll): look again then, and whether the topic's brokers write this journal"
        )
    if found.unheard:
        named = ", ".join(repr(id) for id in found.unheard[:STORIES])
        said.append(f"the journal, which ends at {ends}, has no event of the id {named}")
    return said


def _count(events: DataFrame, whole: DataFrame, found: Audit) -> None:
    counts = events.groupBy("kind").agg(F.sum(F.coalesce("count", F.lit(1))).alias("events")).orderBy("kind")
    found.events = {row["kind"]: int(row["events"]) for row in counts.collect()}
    told = whole.agg(
        F.count_if(F.col("put").isNotNull()).alias("put"),
        F.count_if(F.col("delivered") > 0).alias("delivered"),
        F.count_if(F.col("delivered") > 1).alias("redelivered"),
        F.count_if(F.col("acked") > 0).alias("acked"),
        F.count_if(F.col("acked_late") > 0).alias("acked_late"),
        F.count_if(F.col("moved") > 0).alias("moved"),
        F.count_if(F.col("cancelled") | F.col("by_tag")).alias("cancelled"),
        F.count_if(F.col("buried") > 0).alias("buried"),
        F.count_if(is_open()).alias("open"),
        F.count_if(F.col("astray") & ~F.col("lost")).alias("unknown"),
    ).head()  # fmt: skip
    assert told is not None
    found.messages = {name: int(value) for name, value in told.asDict().items()}
    found.open, found.unknown = found.messages["open"], found.messages.pop("unknown")


def _percentiles() -> list[Any]:
    at = F.percentile_approx("lateness", list(PERCENTILES), ACCURACY).alias("at")
    return [F.count("*").alias("deliveries"), F.min("lateness").alias("least"), at]


def _measure(events: DataFrame, found: Audit) -> None:
    """Lateness of first deliveries, and why deliveries were late or came again."""
    delivered = events.where(is_kind("delivered"))
    first = delivered.where(~F.col("again") & F.col("lateness").isNotNull())
    hours = first.withColumn("at_hour", F.date_format(F.date_trunc("hour", "time"), "yyyy-MM-dd HH:00"))
    kinds = [("topic", first, "topic"), ("hour", hours, "at_hour"), ("consumer", first, "consumer")]
    span_ms = found.until_ms - found.since_ms
    step_ms = next((one for one in STEPS_MS if span_ms < POINTS * one), 0)
    if step_ms:
        at = F.timestamp_millis(F.floor(F.unix_millis("time") / step_ms) * step_ms)
        kinds.append(("time", first.withColumn("at_time", F.date_format(at, "yyyy-MM-dd HH:mm:ss")), "at_time"))
    for name, deliveries, by in kinds:
        grouped = deliveries.groupBy(F.col(by).alias("of")).agg(*_percentiles())
        order = "of" if name in ("hour", "time") else F.desc("deliveries")
        found.lateness[name] = rows_of(grouped.orderBy(order).limit(1_000))
    bucket = F.when(F.col("lateness") <= 0, F.lit(0)).otherwise(F.floor(F.log2(F.greatest("lateness", F.lit(1)))) + 1)
    found.histogram = rows_of(first.groupBy(bucket.alias("bucket")).count().orderBy("bucket"))
    late = (
        first.where(F.col("lateness") > LATE_MS).groupBy(F.coalesce("cause", F.lit("unexplained")).alias("of")).count()
    )
    found.late = {row["of"]: row["count"] for row in late.orderBy(F.desc("count")).collect()}
    causes = events.where(is_kind("ran_out", "released", "handed_back", "relet")).groupBy("kind").count()
    found.redelivered = {row["kind"]: row["count"] for row in causes.orderBy(F.desc("count")).collect()}


def _judge(whole: DataFrame, pending: Pending | None, found: Audit) -> list[str]:
    """What is broken; the ids of some of it."""
    bad = broken(whole).persist(StorageLevel.MEMORY_AND_DISK)
    found.broken = {row["promise"]: row["count"] for row in bad.groupBy("promise").count().orderBy("promise").collect()}
    if found.broken:
        some = bad.select("promise", "topic", "id", "put", "last", "ended", "delivered", "lateness")
        found.examples = rows_of(some.orderBy("promise", "id").limit(EXAMPLES))
    bad.unpersist()
    if pending is not None:
        there = pending.rows.select("topic", "id", "birth")
        found.pending = whole.where(is_open()).join(there, ["topic", "id", "birth"], "left_semi").count()
    return [row["id"] for row in found.examples]


def _tell(events: DataFrame, whole: DataFrame, ids: Sequence[str], found: Audit) -> None:
    """The stories of `ids`, and of those that were latest, came most often or were never settled."""
    chosen = list(dict.fromkeys(ids))[:STORIES]
    for order, where in (
        (F.desc("lateness"), "lateness > 0"),
        (F.desc("delivered"), "delivered > 1"),
        (F.asc("put"), None),
    ):
        few = whole.where(where) if where else whole.where(is_open())
        chosen += [row["id"] for row in few.orderBy(order, "id").select("id").limit(5).collect()]
    chosen = list(dict.fromkeys(chosen))
    columns = ("topic", "id", "time", "kind", "version", "due", "lateness", "consumer", "cause", "broker")
    told = events.where(F.col("id").isin(*chosen)).select(*columns) if chosen else None
    for row in rows_of(told.orderBy("id", "time", "version").limit(100 * STORIES)) if told is not None else ():
        found.stories.setdefault(row["id"], []).append(row)


_SHOWN = [f"p{100 * share:g}" if share < 1 else "most" for share in PERCENTILES]


def audit_page(found: Audit, source: str) -> str:
    """The whole page; `source`: where the journal is."""
    under = f"{source}, {_when(found.since_ms)} to {_when(found.until_ms)} UTC"
    makers = (_verdict, _glance, _lateness, _late, _again, _open, _stories)
    return page("What happened to every message", under, [make(found) for make in makers])


def _when(millis: int) -> str:
    return as_datetime(millis).strftime("%Y-%m-%d %H:%M:%S") if millis else "–"


def _verdict(found: Audit) -> str:
    told = [(f"Broken for {count:,} messages: {PROMISES[name]}", "bad") for name, count in found.broken.items()]
    told += [(f"Not known: {sentence}.", "bad") for sentence in silence(found)]
    if not found.broken and found.events:
        checked = [
            text.partition(":")[0] for name, text in PROMISES.items() if name != "lost" or found.pending is not None
        ]
        told.append((f"Kept for every message: {', '.join(checked)}.", "good"))
    if found.pending is None:
        what = "What lies on the timelines was not looked at: nothing could be called lost (--topic or --backup)."
        told.append((what, "soft"))
    for gap in found.gaps:
        what = f"{_missing(gap.events)} of broker {gap.broker} are missing"
        told.append((f"Not known: {what}, from {_when(gap.since_ms)} to {_when(gap.until_ms)}.", "bad"))
    if found.unknown:
        what = f"{found.unknown:,} messages are not on the timeline, and what ended them may be missing in the journal"
        told.append((f"Not known: {what}, or not be written yet.", "soft"))
    if found.unended:
        named = ", ".join(sorted(set(found.unended))[:10])
        what = f"{len(found.unended)} broker sessions never said that they ended, being running or killed: {named}."
        told.append((what, "soft"))
    parts = [paragraph(*one) for one in told]
    shown = ("promise", "topic", "id", "put", "last", "ended", "delivered")
    if found.examples:
        heads = ("promise", "topic", "id", "put", "last seen", "last event", "deliveries")
        parts.append(table(heads, [[row[name] for name in shown] for row in found.examples]))
    return section("The promises", *parts)


def _missing(events: int) -> str:
    return f"{events:,} events" if events else "events, nobody knows how many,"


def _glance(found: Audit) -> str:
    told = found.messages
    names = ("put", "delivered", "acked", "moved", "cancelled", "buried", "redelivered", "open")
    values = [(name, f"{told.get(name, 0):,}") for name in names]
    rows = [(kind.replace("_", " "), count) for kind, count in found.events.items()]
    return section("Messages", tiles(values), folded("events by kind", table(("event", "how many"), rows)))


def _ms(value: Any) -> str:
    return f"{value:,} ms" if value is not None and value < 10_000 else f"{(value or 0) / 1000:,.1f} s"


def _lateness(found: Audit) -> str:
    heads = ("", "deliveries", "least", *_SHOWN)
    parts: list[str] = []
    names = [_bucket(row["bucket"]) for row in found.histogram]
    counts = [float(row["count"]) for row in found.histogram]
    parts.append(bars("first deliveries by lateness", list(zip(names, counts, strict=True))))
    fine = found.lateness.get("time", [])
    steps = fine or found.lateness.get("hour", [])
    if steps:
        series = {_SHOWN[at]: [float(row["at"][at] or 0) for row in steps] for at in (0, 2, 3)}
        names = [row["of"][11 if fine else 5 :] for row in steps]
        parts.append(lines("lateness over time", names, series, axis=_short_ms))
    for name in ("topic", "consumer"):
        rows = [
            (row["of"] or "–", row["deliveries"], _ms(row["least"]), *(_ms(value) for value in row["at"]))
            for row in found.lateness.get(name, [])[:100]
        ]
        parts.append(folded(f"by {name}", table(heads, rows)) if name == "consumer" else table(heads, rows))
    return section("Lateness: from due to handed to the wire, first deliveries", *parts)


def _short_ms(value: float) -> str:
    """Of an axis."""
    return f"{value:.3g} ms" if value < 1_000 else f"{value / 1_000:.3g} s"


def _bucket(number: int) -> str:
    return "0 ms" if number == 0 else _ms(1 << (number - 1)) if number == 1 else f"≥{_ms(1 << (number - 1))}"


def _late(found: Audit) -> str:
    causes = {cause.replace("_", " "): count for cause, count in found.late.items()}
    return _causes("Late by more than 50 ms", "late deliveries by cause", causes)


def _again(found: Audit) -> str:
    words = {
        "ran_out": "lease ran out",
        "released": "released",
        "handed_back": "handed back unseen",
        "relet": "same holder, new session",
    }
    causes = {words[kind]: count for kind, count in found.redelivered.items()}
    return _causes("Given again", "redeliveries by cause", causes)


def _causes(title: str, label: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return section(title, paragraph("nothing", "good"))
    return section(f"{title}, and why", bars(label, [(cause, float(count)) for cause, count in counts.items()]))


def _open(found: Audit) -> str:
    told = f"{found.open:,} messages were put and not settled by the end"
    there = "" if found.pending is None else f"; {found.pending:,} of them are on the timeline still"
    return section("Not settled", paragraph(f"{told}{there}."))


def _stories(found: Audit) -> str:
    heads = ("time", "event", "topic", "version", "due", "late by, ms", "consumer", "cause or reason")
    parts: list[str] = []
    for id, events in found.stories.items():
        rows = [
            (_time(one["time"]), one["kind"].replace("_", " "), one["topic"], one["version"], _time(one["due"]),
             one["lateness"], one["consumer"], one["cause"])
            for one in events
        ]  # fmt: skip
        parts.append(folded(f"{id}: {len(events)} events", table(heads, rows)))
    return section("Stories", *(parts or [paragraph("none asked for", "soft")]))


def _time(at: datetime | None) -> str:
    return at.strftime("%m-%d %H:%M:%S.%f")[:-3] if at is not None else "–"
