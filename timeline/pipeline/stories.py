"""Events → every message's story, and what the promises of `invariants.md` say of it. All of it expressions over the
journal; a message is one life of an id: what was put under one birth."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from timeline.pipeline.journal import is_kind

ENDS = ("acked", "buried", "expired", "purged")
BY_ID = ("cancelled", "moved", "revived", "purged", "expired")
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


def lives(events: DataFrame) -> DataFrame:
    """A row for each life of an id: what happened to it, how often, and when."""
    delivered = is_kind("delivered")
    born = events.where(F.col("birth").isNotNull() & F.col("id").isNotNull())
    told = born.groupBy(*_LIFE).agg(
        F.min(F.when(is_kind("put"), F.col("time"))).alias("put"),
        F.max("time").alias("last"),
        F.max_by("kind", F.struct("time", "version")).alias("ended"),
        F.max("tag").alias("tag"),
        _count("delivered").alias("delivered"),
        F.size(F.collect_set(F.when(delivered, F.col("version")))).alias("versions"),
        _count("acked").alias("acked"),
        F.count_if(is_kind("acked") & F.col("again")).alias("acked_late"),
        _count("ran_out").alias("ran_out"),
        _count("released").alias("released"),
        _count("buried").alias("buried"),
        _count(*EXPLAINS).alias("explained"),
        _count(*ENDS).alias("ends"),
        F.max(F.when(delivered, F.col("version"))).alias("last_version"),
        F.min(F.when(is_kind("acked"), F.col("version"))).alias("acked_version"),
        F.count_if(delivered & (F.col("lateness") < 0)).alias("early"),
        F.count_if(is_kind("ran_out") & (F.col("time") < F.col("due"))).alias("reclaimed"),
        F.min(F.when(delivered & ~F.col("again"), F.col("lateness"))).alias("lateness"),
        F.min(F.when(delivered, F.col("time"))).alias("first_delivered"),
        F.max(F.when(delivered, F.col("consumer"))).alias("consumer"),
    )  # fmt: skip
    asked = events.where(is_kind(*BY_ID) & F.col("id").isNotNull() & F.col("birth").isNull())
    by_id = asked.groupBy("topic", "id").agg(
        _count("moved").alias("moved"),
        F.max(F.when(is_kind("cancelled"), F.col("time"))).alias("cancelled_at"),
        F.max(F.when(is_kind("purged", "expired"), F.col("time"))).alias("gone_at"),
    )  # fmt: skip
    whole = told.join(by_id, ["topic", "id"], "left")
    return whole.withColumns(
        {
            "moved": F.coalesce("moved", F.lit(0)),
            "cancelled": F.coalesce(F.col("cancelled_at") >= F.coalesce("put", "cancelled_at"), F.lit(False))
            & (F.col("acked") == 0),
            "gone": F.coalesce(F.col("gone_at") >= F.coalesce("put", "gone_at"), F.lit(False)),
        }
    )


def cancelled_by_tag(whole: DataFrame, events: DataFrame) -> DataFrame:
    """With `by_tag`: whether the tag of a message was cancelled after it was put."""
    tags = events.where(is_kind("tag_cancelled")).groupBy("topic", "tag").agg(F.max("time").alias("tag_cancelled_at"))
    joined = whole.join(F.broadcast(tags), ["topic", "tag"], "left")
    return joined.withColumn("by_tag", F.coalesce(F.col("tag_cancelled_at") >= F.col("put"), F.lit(False)))


def is_open() -> Column:
    """Put, and nothing is known to have ended it."""
    over = (F.col("ends") > 0) | F.col("cancelled") | F.col("gone") | F.col("by_tag")
    return F.col("put").isNotNull() & ~over


def broken(whole: DataFrame, pending: DataFrame | None, gaps: Sequence[tuple[int, int]]) -> DataFrame:
    """The lives with the promise that was broken, in `promise`. `pending`: what lies on the timeline still (topic, id,
    birth); None: not known, so that nothing counts as lost. Within `gaps` (from, to in ms) the journal says nothing,
    and what is missing there proves nothing."""
    unsure = F.lit(False)
    for since_ms, until_ms in gaps:
        unsure = unsure | (
            (F.unix_millis(F.coalesce("put", "last")) <= until_ms) & (F.unix_millis("last") >= since_ms - 1)
        )
        unsure = unsure | (is_open() & (F.unix_millis(F.coalesce("put", "last")) <= until_ms))
    lost = F.lit(False)
    if pending is not None:
        there = pending.select("topic", "id", "birth").withColumn("there", F.lit(True))
        whole = whole.join(there, list(_LIFE), "left")
        lost = is_open() & F.col("there").isNull() & ~unsure
    found = {
        "early": F.col("early") > 0,
        "twice": F.col("delivered") > F.col("versions"),
        "resurrected": F.col("last_version") > F.col("acked_version"),
        "lost": lost,
        "unexplained": (F.col("delivered") - 1 > F.col("explained")) & F.col("put").isNotNull() & ~unsure,
        "reclaimed": F.col("reclaimed") > 0,
    }
    promises = F.array_compact(F.array(*(F.when(wrong, F.lit(name)) for name, wrong in found.items())))
    return whole.withColumn("promise", F.explode(promises))
