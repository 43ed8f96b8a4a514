"""Events → every message's story, and what the promises of `invariants.md` say of it. All are expressions of Spark.

A message is one life of an id: what was put under one birth. `Pending` is what lies on timelines still, of a backup or
of the brokers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.jobs.backup import data_of, read_manifest
from timeline.pipeline.jobs.journal import is_kind
from timeline.pipeline.session import read_topic

SKEW_MS = 1_000
"""By so much the clocks of two brokers may differ: one that is further off the others leases nothing."""
ENDS = ("acked", "buried", "expired", "purged", "replaced")
BY_ID = ("cancelled", "moved", "revived", "purged", "expired", "unknown")
"""Told by a producer, who knows no birth: they count for the life of the id that was on when they happened."""
EXPLAINS = ("ran_out", "released", "handed_back", "relet")
PROMISES = {
    "early": "S1 never early: delivered before it was due",
    "twice": "S2 versions: one lease was handed to a consumer twice",
    "resurrected": "S6 no resurrection: delivered under a later lease than the one that acknowledged it",
    "lost": "S8 no loss: put, never settled, and not on the timeline",
    "unexplained": "S10 once, at best: a redelivery that nothing explains",
    "reclaimed": "S11 no early reclaim: leased again before the lease had ended",
}
_LIFE = ("topic", "id", "birth")


def _count(*kinds: str) -> Column:
    return F.count_if(is_kind(*kinds))


def lives(events: DataFrame, until_ms: int) -> DataFrame:
    """A row for each life of an id, as of `until_ms`: what happened to it, how often, and when."""
    delivered = is_kind("delivered")
    born = events.where(F.col("birth").isNotNull() & F.col("id").isNotNull())
    told = born.groupBy(*_LIFE).agg(
        F.min(F.when(is_kind("put"), F.col("time"))).alias("put"),
        F.max(F.when(is_kind("put"), F.col("broker"))).alias("put_by"),
        F.max("time").alias("last"),
        F.max_by("kind", F.struct("time", "version")).alias("ended"),
        F.max("tag").alias("tag"),
        F.max(F.when(is_kind("put"), F.col("expires"))).alias("expires"),
        _count("delivered").alias("delivered"),
        F.size(F.collect_set(F.when(delivered, F.col("version")))).alias("versions"),
        _count("acked").alias("acked"),
        F.count_if(is_kind("acked") & F.col("again")).alias("acked_late"),
        _count("ran_out").alias("ran_out"),
        _count("released").alias("released"),
        _count("buried").alias("buried"),
        _count(*EXPLAINS).alias("explained"),
        _count(*ENDS).alias("ends"),
        _count("unknown").alias("unknown"),
        F.max(F.when(delivered, F.col("version"))).alias("last_version"),
        F.min(F.when(is_kind("acked"), F.col("version"))).alias("acked_version"),
        F.count_if(delivered & (F.col("lateness") < 0)).alias("early"),
        F.count_if(is_kind("ran_out") & (F.col("time") < F.col("due"))).alias("reclaimed"),
        F.min(F.when(delivered & ~F.col("again"), F.col("lateness"))).alias("lateness"),
        F.min(F.when(delivered, F.col("time"))).alias("first_delivered"),
        F.max(F.when(delivered, F.col("consumer"))).alias("consumer"),
    )  # fmt: skip
    dropped = events.where(is_kind("topic_dropped")).groupBy("topic").agg(
        F.max("time").alias("dropped_at"), F.max_by("broker", "time").alias("dropped_by")
    )  # fmt: skip
    whole = told.join(_by_id(events), ["topic", "id"], "left").join(F.broadcast(dropped), "topic", "left")
    nought = F.lit(0)
    moved = F.coalesce("moved", nought)
    # An id may be put anew as soon as it is cancelled, a topic made anew as soon as it is dropped: only where two
    # brokers say so their clocks may deceive.
    skew_ms = {
        by: F.when(F.col("put_by") != F.col(by), F.lit(SKEW_MS)).otherwise(nought)
        for by in ("cancelled_by", "dropped_by")
    }
    cancelled = _since("cancelled_at", "put", skew_ms["cancelled_by"])
    # A move or a revival ends what was before it without a word about the lease that had run out.
    again = F.when(_since("moved_at", "first_delivered"), moved).otherwise(nought) + F.coalesce("revived", nought)
    return whole.withColumns(
        {
            "moved": moved,
            "explained": F.col("explained") + again,
            "unknown": F.col("unknown") + F.coalesce("unknown_by_id", nought),
            "cancelled": cancelled & (F.col("acked") == 0),
            # What the store removes by itself when its time is over, it does not name.
            "gone": cancelled
            | _since("dropped_at", "put", skew_ms["dropped_by"])
            | _since("gone_at", "put")
            | F.coalesce(F.unix_millis("expires") <= until_ms, F.lit(False)),
        }
    )


def _by_id(events: DataFrame) -> DataFrame:
    """Return what producers did to each id, whatever its life."""
    asked = events.where(is_kind(*BY_ID) & F.col("id").isNotNull() & F.col("birth").isNull())
    return asked.groupBy("topic", "id").agg(
        _count("moved").alias("moved"),
        _count("revived").alias("revived"),
        _count("unknown").alias("unknown_by_id"),
        F.max(F.when(is_kind("moved"), F.col("time"))).alias("moved_at"),
        F.max(F.when(is_kind("cancelled"), F.col("time"))).alias("cancelled_at"),
        F.max_by("broker", F.when(is_kind("cancelled"), F.col("time"))).alias("cancelled_by"),
        F.max(F.when(is_kind("purged", "expired"), F.col("time"))).alias("gone_at"),
    )  # fmt: skip


def _since(later: str, earlier: str, skew_ms: Column | int = SKEW_MS) -> Column:
    """Whether the one happened after the other, as far as the clocks of two brokers tell; also where it is not known
    when the latter did."""
    told = F.unix_millis(later) + skew_ms >= F.unix_millis(F.coalesce(earlier, later))
    return F.coalesce(told, F.lit(False))


def with_tags(whole: DataFrame, events: DataFrame) -> DataFrame:
    """With `by_tag`: whether a cancellation of its tag took a message away; a move of its tag explains another
    delivery."""
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
    """Put, and nothing is known to have ended it."""
    over = (F.col("ends") > 0) | F.col("cancelled") | F.col("gone") | F.col("by_tag")
    return F.col("put").isNotNull() & ~over


def judged(whole: DataFrame, pending: Pending | None, spans: Sequence[tuple[int, int]]) -> DataFrame:
    """The lives with what is to be known before a promise is called broken. `unsure`: whether a part of it may lie in
    `spans` (from, to in ms), of which the journal says nothing: what is missing there proves nothing. `astray`: whether
    it is open, and not on the timeline, though it was put before `pending` was read; `lost`: and nothing that is not
    known can have ended it."""
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
    """Of lives that are `judged` those with a promise that was broken, in `promise`."""
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
    """`rows`: topic, id and birth of what lay on `topics` when that was read, from `since_ms` to `until_ms` by a
    broker's clock. What was put later than it began, or is of another topic, may be missing in it."""

    rows: DataFrame
    topics: tuple[str, ...]
    since_ms: int
    until_ms: int


def pending_in(spark: SparkSession, addresses: str, topics: Sequence[str], backup: str) -> Pending | None:
    """The messages of a backup, or of `topics` as the brokers have them now: read at once, so that what is audited
    then is no older. None when neither is named."""
    if backup:
        manifest = read_manifest(backup)
        rows = data_of(spark, backup, manifest.chunks)
        named = rows.select(F.lit(manifest.topic).alias("topic"), "id", "birth")
        return Pending(named, (manifest.topic,), manifest.taken_ms, manifest.until_ms)
    if not topics:
        return None
    since_ms = _now_ms(addresses)
    rows = reduce(DataFrame.unionByName, (_of(spark, addresses, topic) for topic in topics))
    rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
    rows.count()
    return Pending(rows, tuple(topics), since_ms, _now_ms(addresses))


def _now_ms(addresses: str) -> int:
    """By a broker's clock."""
    with SparkConnection(addresses) as connection:
        return round(Clock().now_ms() + connection.run(connection.client.ping()).offset_ms)


def _of(spark: SparkSession, addresses: str, topic: str) -> DataFrame:
    rows = read_topic(spark, addresses, topic, "id string, birth long")
    return rows.select(F.lit(topic).alias("topic"), "id", "birth")
