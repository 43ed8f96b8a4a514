"""The job `audit` and its page: what happened to every message, out of the journal, and whether the promises hold.

The audit reports lateness by topic, hour and consumer, and redeliveries with their causes. It names messages that were
put and never settled, and each broken promise of `invariants.md`. If brokers dropped events, or ended without a word,
it says for which interval nothing is known.

A message is one life of an id: what was put under one birth. All of it is expressions of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.jobs.backup import data_of, read_manifest
from timeline.pipeline.jobs.journal import Gap, gaps, is_kind, journal, rows_of
from timeline.pipeline.jobs.page import bars, folded, lines, page, paragraph, section, table, tiles
from timeline.pipeline.session import Progress, quiet, read_topic

EXAMPLES = 20
STEPS_MS = (1_000, 10_000, 60_000, 600_000)
POINTS = 150
"""Lateness over time is drawn in the smallest of `STEPS_MS` with at most this many points; beyond that, by hour."""
STORIES = 40
PERCENTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
ACCURACY = 10_000
LATE_MS = 50
SKEW_MS = 1_000
"""How much the clocks of two brokers may differ: a broker that is further off leases nothing."""
ENDS = ("acked", "buried", "expired", "purged", "replaced")
BY_ID = ("cancelled", "moved", "revived", "purged", "expired", "unknown")
"""Events of a producer, which knows no birth. They count for the life that the id had when they happened."""
_AGAIN = {
    "ran_out": "lease ran out",
    "released": "released",
    "handed_back": "returned unseen",
    "relet": "same holder, new session",
}
"""Events that explain a redelivery, and their names."""
PROMISES = {
    "early": "S1 never early: delivered before it was due",
    "twice": "S2 versions: one lease was handed to a consumer twice",
    "resurrected": "S6 no resurrection: delivered under a later lease than the one that acknowledged it",
    "lost": "S8 no loss: put, never settled, and not on the timeline",
    "unexplained": "S10 once, at best: a redelivery that nothing explains",
    "reclaimed": "S11 no early reclaim: leased again before the lease had ended",
}
_LIFE = ("topic", "id", "birth")


def _times(*kinds: str) -> Column:
    return F.count_if(is_kind(*kinds))


def _changes(*kinds: str) -> Column:
    """Return how many changes there were. A repeated call, whose first answer was lost, is an event of the same
    version."""
    change, version = is_kind(*kinds), F.col("version")
    told = F.collect_set(F.when(change & version.isNotNull(), F.struct("kind", "version")))
    return F.size(told) + F.count_if(change & version.isNull())


def lives(events: DataFrame, until_ms: int) -> DataFrame:
    """Return a row per life of an id, as of `until_ms`: what happened to it, how often, and when."""
    delivered = is_kind("delivered")
    born = events.where(F.col("birth").isNotNull() & F.col("id").isNotNull())
    told = born.groupBy(*_LIFE).agg(
        F.min(F.when(is_kind("put"), F.col("time"))).alias("put"),
        F.max(F.when(is_kind("put"), F.col("broker"))).alias("put_by"),
        F.max("time").alias("last"),
        F.max_by("kind", F.struct("time", "version")).alias("ended"),
        F.max("tag").alias("tag"),
        F.max(F.when(is_kind("put"), F.col("expires"))).alias("expires"),
        _times("delivered").alias("delivered"),
        F.size(F.collect_set(F.when(delivered, F.col("version")))).alias("versions"),
        _times("acked").alias("acked"),
        F.count_if(is_kind("acked") & F.col("again")).alias("acked_late"),
        _changes("buried").alias("buried"),
        _changes(*_AGAIN).alias("explained"),
        _times(*ENDS).alias("ends"),
        _times("unknown").alias("unknown"),
        F.max(F.when(delivered, F.col("version"))).alias("last_version"),
        F.min(F.when(is_kind("acked"), F.col("version"))).alias("acked_version"),
        F.count_if(delivered & (F.col("lateness") < 0)).alias("early"),
        F.count_if(is_kind("ran_out") & (F.col("time") < F.col("due"))).alias("reclaimed"),
        F.min(F.when(delivered & ~F.col("again"), F.col("lateness"))).alias("lateness"),
        F.min(F.when(delivered, F.col("time"))).alias("first_delivered"),
    )  # fmt: skip
    dropped = events.where(is_kind("topic_dropped")).groupBy("topic").agg(
        F.max("time").alias("dropped_at"), F.max_by("broker", "time").alias("dropped_by")
    )  # fmt: skip
    whole = told.join(_by_id(events), ["topic", "id"], "left").join(F.broadcast(dropped), "topic", "left")
    nought = F.lit(0)
    moved = F.coalesce("moved", nought)
    # An id may be put again right after its cancellation, and a topic created right after its drop. Clocks differ only
    # where two brokers report these events.
    skew_ms = {
        by: F.when(F.col("put_by") != F.col(by), F.lit(SKEW_MS)).otherwise(nought)
        for by in ("cancelled_by", "dropped_by")
    }
    cancelled = _since("cancelled_at", "put", skew_ms["cancelled_by"])
    # A move or a revival explains a redelivery: no event reports that the lease before it had run out.
    again = F.when(_since("moved_at", "first_delivered"), moved).otherwise(nought) + F.coalesce("revived", nought)
    return whole.withColumns(
        {
            "moved": moved,
            "explained": F.col("explained") + again,
            "unknown": F.col("unknown") + F.coalesce("unknown_by_id", nought),
            "cancelled": cancelled & (F.col("acked") == 0),
            # The store removes expired messages without an event for each.
            "gone": cancelled
            | _since("dropped_at", "put", skew_ms["dropped_by"])
            | _since("gone_at", "put")
            | F.coalesce(F.unix_millis("expires") <= until_ms, F.lit(False)),
        }
    )


def _by_id(events: DataFrame) -> DataFrame:
    """Return what producers did to each id, in any of its lives."""
    asked = events.where(is_kind(*BY_ID) & F.col("id").isNotNull() & F.col("birth").isNull())
    return asked.groupBy("topic", "id").agg(
        _changes("moved").alias("moved"),
        _changes("revived").alias("revived"),
        _times("unknown").alias("unknown_by_id"),
        F.max(F.when(is_kind("moved"), F.col("time"))).alias("moved_at"),
        F.max(F.when(is_kind("cancelled"), F.col("time"))).alias("cancelled_at"),
        F.max_by("broker", F.when(is_kind("cancelled"), F.col("time"))).alias("cancelled_by"),
        F.max(F.when(is_kind("purged", "expired"), F.col("time"))).alias("gone_at"),
    )  # fmt: skip


def _since(later: str, earlier: str, skew_ms: Column | int = SKEW_MS) -> Column:
    """Whether `later` happened after `earlier`, as far as two brokers' clocks can tell. True if `earlier` has no
    time."""
    told = F.unix_millis(later) + skew_ms >= F.unix_millis(F.coalesce(earlier, later))
    return F.coalesce(told, F.lit(False))


def with_tags(whole: DataFrame, events: DataFrame) -> DataFrame:
    """Add `by_tag`: whether a cancellation of its tag removed the message. A move of its tag explains a redelivery."""
    tags = events.where(is_kind("tag_cancelled", "tag_moved")).groupBy("topic", "tag").agg(
        F.max(F.when(is_kind("tag_cancelled"), F.col("time"))).alias("tag_cancelled_at"),
        F.max(F.when(is_kind("tag_moved"), F.col("time"))).alias("tag_moved_at"),
    )  # fmt: skip
    joined = whole.join(F.broadcast(tags), ["topic", "tag"], "left")
    settled = (F.col("ends") > 0) | F.col("cancelled")
    return joined.withColumns(
        {
            "by_tag": _since("tag_cancelled_at", "put", 0) & F.col("put").isNotNull() & ~settled,
            "explained": F.col("explained") + F.when(_since("tag_moved_at", "first_delivered"), 1).otherwise(0),
        }
    )


def is_open() -> Column:
    """Whether a life was put, and no known event ended it."""
    over = (F.col("ends") > 0) | F.col("cancelled") | F.col("gone") | F.col("by_tag")
    return F.col("put").isNotNull() & ~over


def judged(whole: DataFrame, pending: Pending | None, spans: Sequence[tuple[int, int]]) -> DataFrame:
    """Add what must be known before a promise is called broken.

    `unsure`: a part of the life may lie in `spans` (from, to, in ms), of which the journal has nothing. `astray`: the
    life is open and not on the timeline, though it was put before `pending` was read. `lost`: it is astray, and no
    missing event can have ended it."""
    unsure = F.col("unknown") > 0
    for span in spans:
        unsure = unsure | _touches(*span) | (is_open() & _before(span[1]))
    if pending is None:
        return whole.withColumns({"unsure": unsure, "astray": F.lit(False), "lost": F.lit(False)})
    there = pending.rows.select(*_LIFE).withColumn("there", F.lit(True))
    astray = is_open() & F.col("there").isNull() & _before(pending.since_ms - SKEW_MS)
    astray = astray & F.col("topic").isin(*pending.topics)
    known = F.col("unknown") == 0
    for since_ms, until_ms in spans:
        if since_ms <= pending.until_ms + SKEW_MS:
            known = known & ~_before(until_ms)
    whole = whole.join(there, list(_LIFE), "left")
    return whole.withColumns({"unsure": unsure, "astray": astray, "lost": astray & known})


def _before(millis: int) -> Column:
    return F.unix_millis(F.coalesce("put", "last")) <= millis


def _touches(since_ms: int, until_ms: int) -> Column:
    return _before(until_ms) & (F.unix_millis("last") >= since_ms - 1)


def broken(whole: DataFrame) -> DataFrame:
    """Return the `judged` lives that broke a promise, one row per `promise`."""
    found = {
        "early": F.col("early") > 0,
        "twice": F.col("delivered") > F.col("versions"),
        "resurrected": F.col("last_version") > F.col("acked_version"),
        "lost": F.col("lost"),
        "unexplained": (F.col("delivered") - 1 > F.col("explained")) & F.col("put").isNotNull() & ~F.col("unsure"),
        "reclaimed": F.col("reclaimed") > 0,
    }
    promises = F.array_compact(F.array(*(F.when(wrong, F.lit(name)) for name, wrong in found.items())))
    return whole.withColumn("promise", F.explode(promises))


@dataclass
class Pending:
    """Messages on timelines, of a backup or of the brokers. `rows`: topic, id and birth of the messages on `topics`,
    read from `since_ms` to `until_ms` by a broker's clock. Messages put after `since_ms` may be missing."""

    rows: DataFrame
    topics: tuple[str, ...]
    since_ms: int
    until_ms: int


def pending_in(spark: SparkSession, addresses: str, topics: Sequence[str], backup: str) -> Pending | None:
    """Return the messages of a backup, or of `topics` as the brokers have them now; None if neither is named. They are
    read at once, so that the journal read afterwards is not older."""
    if backup:
        manifest = read_manifest(backup)
        rows = data_of(spark, backup, manifest.chunks)
        named = rows.select(F.lit(manifest.topic).alias("topic"), "id", "birth")
        return Pending(named, (manifest.topic,), manifest.taken_ms, manifest.until_ms)
    if not topics:
        return None
    since_ms = _broker_now_ms(addresses)
    rows = reduce(DataFrame.unionByName, (_of(spark, addresses, topic) for topic in topics))
    rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
    rows.count()
    return Pending(rows, tuple(topics), since_ms, _broker_now_ms(addresses))


def _broker_now_ms(addresses: str) -> int:
    with SparkConnection(addresses) as connection:
        return connection.broker_now_ms()


def _of(spark: SparkSession, addresses: str, topic: str) -> DataFrame:
    rows = read_topic(spark, addresses, topic, "id string, birth long")
    return rows.select(F.lit(topic).alias("topic"), "id", "birth")


@dataclass
class Audit:
    """The result of an audit."""

    since_ms: int = 0
    until_ms: int = 0
    """The first and the last event that was audited."""
    messages: dict[str, int] = field(default_factory=dict)
    """How many messages were put, delivered at least once, acked and so on."""
    events: dict[str, int] = field(default_factory=dict)
    """How many events there are of each kind."""
    lateness: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Percentiles in ms, by topic, hour, consumer and, for a journal of some days at most, time."""
    histogram: list[dict[str, Any]] = field(default_factory=list)
    redelivered: dict[str, int] = field(default_factory=dict)
    """Redeliveries by cause."""
    late: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    """Messages by broken promise, and some of them."""
    open: int = 0
    """Messages that were put and never settled."""
    pending: int | None = None
    """Open messages that are on the timeline; None: not looked at."""
    unknown: int = 0
    """Open messages that are not on the timeline. The event that ended them may be missing, or not be written yet."""
    gaps: list[Gap] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Topics asked for of which the journal has no event; `*`: it has none of any topic."""
    unheard: list[str] = field(default_factory=list)
    """Ids asked for of which the journal has no event."""
    ends_ms: int = 0
    """The last event of the whole journal."""
    unended: list[str] = field(default_factory=list)
    """Brokers whose session has no end: they are running, or were killed."""
    stories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1: a promise was broken. 3: events are missing, or there are none of a topic. 0: neither."""
        return 1 if self.broken else 3 if self.gaps or self.silent else 0

    @property
    def verdict(self) -> str:
        """The verdict where no promise was broken. Without events, none was looked at."""
        return "every promise was kept" if self.events else "no promise was looked at: no event was found"


def audit(
    spark: SparkSession,
    url: str,
    topics: Sequence[str] = (),
    pending: Pending | None = None,
    ids: Sequence[str] = (),
    progress: Progress = quiet,
) -> Audit:
    """Audit the journal at `url`, of `topics` (none: all). `pending`: the messages on the timelines (`pending_in`);
    without them nothing can be called lost. `ids`: messages whose history to show, besides the most telling ones. Raise
    Invalid if there is no journal."""
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
    found.since_ms, found.until_ms = _span(events)
    _, found.ends_ms = _span(everything)
    _listen(events, topics, ids, found)
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


def _span(events: DataFrame) -> tuple[int, int]:
    """Return the times of the first and the last event in ms; 0: there is none."""
    span = events.agg(F.unix_millis(F.min("time")).alias("first"), F.unix_millis(F.max("time")).alias("last")).head()
    return (span["first"] or 0, span["last"] or 0) if span is not None else (0, 0)


def _listen(events: DataFrame, topics: Sequence[str], ids: Sequence[str], found: Audit) -> None:
    """Find the topics and ids asked for of which the journal has nothing."""
    heard = {row["topic"] for row in events.select("topic").distinct().collect()} if topics else set()
    found.silent = [topic for topic in dict.fromkeys(topics) if topic not in heard]
    if not topics and not found.until_ms:
        found.silent = ["*"]
    if ids:
        told = {row["id"] for row in events.where(F.col("id").isin(*ids)).select("id").distinct().collect()}
        found.unheard = [id for id in dict.fromkeys(ids) if id not in told]


def not_known(found: Audit) -> list[str]:
    """Return sentences about everything that the journal does not tell."""
    ends = f"{_when(found.ends_ms)} UTC" if found.ends_ms else "no time"
    said = []
    for topic in found.silent:
        what = "of any topic" if topic == "*" else f"of the topic {topic!r}"
        said.append(
            f"the journal has no event {what}. It ends at {ends}. A running broker writes a file each minute (its "
            "journal's roll). Try again then, and check that the topic's brokers write this journal"
        )
    if found.unheard:
        named = ", ".join(repr(id) for id in found.unheard[:STORIES])
        said.append(f"the journal, which ends at {ends}, has no event of the id {named}")
    for gap in found.gaps:
        events = f"{gap.events:,} events" if gap.events else "an unknown number of events"
        said.append(
            f"{events} of broker {gap.broker} are missing, from {_when(gap.since_ms)} to {_when(gap.until_ms)} UTC"
        )
    if found.unknown:
        said.append(
            f"{found.unknown:,} messages are not on the timeline. The events that ended them may be missing in the "
            "journal, or not be written yet"
        )
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


def _measure(events: DataFrame, found: Audit) -> None:
    """Measure the lateness of first deliveries, and the causes of late deliveries and redeliveries."""
    delivered = events.where(is_kind("delivered"))
    first = delivered.where(~F.col("again") & F.col("lateness").isNotNull())
    by = {
        "topic": F.col("topic"),
        "hour": F.date_format(F.date_trunc("hour", "time"), "yyyy-MM-dd HH:00"),
        "consumer": F.col("consumer"),
    }
    span_ms = found.until_ms - found.since_ms
    step_ms = next((one for one in STEPS_MS if span_ms < POINTS * one), 0)
    if step_ms:
        at = F.timestamp_millis(F.floor(F.unix_millis("time") / step_ms) * step_ms)
        by["time"] = F.date_format(at, "yyyy-MM-dd HH:mm:ss")
    percentiles = F.percentile_approx("lateness", list(PERCENTILES), ACCURACY).alias("at")
    for name, of in by.items():
        grouped = first.groupBy(of.alias("of")).agg(
            F.count("*").alias("deliveries"), F.min("lateness").alias("least"), percentiles
        )
        order = "of" if name in ("hour", "time") else F.desc("deliveries")
        found.lateness[name] = rows_of(grouped.orderBy(order).limit(1_000))
    bucket = F.when(F.col("lateness") <= 0, F.lit(0)).otherwise(F.floor(F.log2(F.greatest("lateness", F.lit(1)))) + 1)
    found.histogram = rows_of(first.groupBy(bucket.alias("bucket")).count().orderBy("bucket"))
    late = (
        first.where(F.col("lateness") > LATE_MS).groupBy(F.coalesce("cause", F.lit("unexplained")).alias("of")).count()
    )
    found.late = {row["of"]: row["count"] for row in late.orderBy(F.desc("count")).collect()}
    causes = events.where(is_kind(*_AGAIN)).groupBy("kind").count()
    found.redelivered = {row["kind"]: row["count"] for row in causes.orderBy(F.desc("count")).collect()}


def _judge(whole: DataFrame, pending: Pending | None, found: Audit) -> list[str]:
    """Find broken promises. Return some of the messages' ids."""
    bad = broken(whole).persist(StorageLevel.MEMORY_AND_DISK)
    found.broken = {row["promise"]: row["count"] for row in bad.groupBy("promise").count().orderBy("promise").collect()}
    if found.broken:
        some = bad.select("promise", "topic", "id", "put", "last", "ended", "delivered", "lateness")
        found.examples = rows_of(some.orderBy("promise", "id").limit(EXAMPLES))
    bad.unpersist()
    if pending is not None:
        found.pending = whole.where(is_open() & F.col("there")).count()
    return [row["id"] for row in found.examples]


def _tell(events: DataFrame, whole: DataFrame, ids: Sequence[str], found: Audit) -> None:
    """Collect the events of `ids`, of the latest messages, of the most redelivered ones and of unsettled ones."""
    chosen = list(dict.fromkeys(ids))[:STORIES]
    for order, telling in (
        (F.desc("lateness"), F.col("lateness") > 0),
        (F.desc("delivered"), F.col("delivered") > 1),
        (F.asc("put"), is_open()),
    ):
        chosen += [row["id"] for row in whole.where(telling).orderBy(order, "id").select("id").limit(5).collect()]
    if not chosen:
        return
    columns = ("topic", "id", "time", "kind", "version", "due", "lateness", "consumer", "cause", "broker")
    told = events.where(F.col("id").isin(*dict.fromkeys(chosen))).select(*columns)
    for row in rows_of(told.orderBy("id", "time", "version").limit(100 * STORIES)):
        found.stories.setdefault(row["id"], []).append(row)


_SHOWN = [f"p{100 * share:g}" if share < 1 else "most" for share in PERCENTILES]


def audit_page(found: Audit, source: str) -> str:
    """Return the page. `source`: the journal's URL, without secrets."""
    under = f"{source}, {_when(found.since_ms)} to {_when(found.until_ms)} UTC"
    late = {cause.replace("_", " "): count for cause, count in found.late.items()}
    again = {_AGAIN[kind]: count for kind, count in found.redelivered.items()}
    parts = (
        _verdict(found),
        _glance(found),
        _lateness(found),
        _causes("Late by more than 50 ms", "late deliveries by cause", late),
        _causes("Given again", "redeliveries by cause", again),
        _open(found),
        _stories(found),
    )
    return page("What happened to every message", under, parts)


def _when(millis: int) -> str:
    return as_datetime(millis).strftime("%Y-%m-%d %H:%M:%S") if millis else "–"


def _verdict(found: Audit) -> str:
    told = [(f"Broken for {count:,} messages: {PROMISES[name]}", "bad") for name, count in found.broken.items()]
    told += [(f"Not known: {sentence}.", "bad") for sentence in not_known(found)]
    if not found.broken and found.events:
        checked = [
            text.partition(":")[0] for name, text in PROMISES.items() if name != "lost" or found.pending is not None
        ]
        told.append((f"Kept for every message: {', '.join(checked)}.", "good"))
    if found.pending is None:
        told.append(("The timelines were not read, so nothing can be called lost (--topic or --backup).", "soft"))
    if found.unended:
        named = ", ".join(sorted(set(found.unended))[:10])
        told.append((f"{len(found.unended)} broker sessions have no end, running or killed: {named}.", "soft"))
    parts = [paragraph(*one) for one in told]
    shown = ("promise", "topic", "id", "put", "last", "ended", "delivered")
    if found.examples:
        heads = ("promise", "topic", "id", "put", "last seen", "last event", "deliveries")
        parts.append(table(heads, [[row[name] for name in shown] for row in found.examples]))
    return section("The promises", *parts)


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
    return f"{value:.3g} ms" if value < 1_000 else f"{value / 1_000:.3g} s"


def _bucket(number: int) -> str:
    return "0 ms" if number == 0 else _ms(1 << (number - 1)) if number == 1 else f"≥{_ms(1 << (number - 1))}"


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
