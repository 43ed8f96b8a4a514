"""The job `restore`: a backup → a topic in any store, ids and scheduled times kept.

The topic is made as it was when it is not there. One that has other messages is refused; one that has some of the
backup's is a restore that broke off, and goes on. Dead letters stay in the backup unless they are asked to live again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.errors import Invalid, NotFound
from timeline.model import TopicSettings
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.jobs.backup import Manifest, check_files, data_of, read_manifest
from timeline.pipeline.jobs.load import write
from timeline.pipeline.session import Progress, quiet, read_topic

PAST = ("refuse", "now", "skip")
DEAD = ("skip", "revive")
EXAMPLES = 10


@dataclass
class Restored:
    """What a restore did. `skipped`: messages that were due by then; `dead`: dead letters that stayed behind;
    `expired`: messages whose time to live was over."""

    topic: str
    messages: int
    put: int = 0
    there: int = 0
    skipped: int = 0
    dead: int = 0
    expired: int = 0
    made: bool = False


@dataclass
class BackupComparison:
    """Both sides held against each other: how many are the same, missing in the topic, there and not in the backup, or
    differing, with some ids and what is wrong with them."""

    same: int = 0
    missing: int = 0
    extra: int = 0
    differing: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        """Whether nothing is missing, differing or too much."""
        return not (self.missing or self.extra or self.differing)


def restore(
    spark: SparkSession,
    addresses: str,
    url: str,
    topic: str = "",
    past: str = "refuse",
    dead: str = "skip",
    progress: Progress = quiet,
) -> Restored:
    """Puts the messages of the backup at `url` on `topic` (empty: the one it was of). `past`: what is to become of
    messages that are due by now. Raises Invalid when the backup is not whole, when the topic has other messages, or,
    with "refuse", when some are due."""
    if past not in PAST or dead not in DEAD:
        raise Invalid(f"past is one of {', '.join(PAST)}, dead one of {', '.join(DEAD)}")
    manifest = read_manifest(url)
    progress("checking the backup", 0, 0)
    check_files(spark, url, manifest)
    rows = data_of(spark, url, manifest.chunks)
    name = topic or manifest.topic
    done = Restored(name, manifest.messages)
    now_ms = Clock().now_ms()
    _count(rows, now_ms, dead, done)
    if past == "refuse" and done.skipped:
        raise Invalid(
            f"{done.skipped:,} of {manifest.messages:,} messages are due by now: restore them as due now (--past now) "
            "or leave them out (--past skip)"
        )
    done.made = _make_topic(addresses, name, manifest)
    if not done.made:
        _check_others(spark, addresses, name, rows)
    due = F.col("scheduled").alias("due")
    chosen = _chosen(rows, now_ms, past, dead).select("id", due, "payload", "tag", "headers", "expires", "group")
    done.skipped = done.skipped if past == "skip" else 0
    for (group,) in sorted(rows.select("group").distinct().collect()):
        options = {
            "addresses": addresses, "topic": name, "group": group, "past": "now", "run": f"restore-{manifest.uid}",
        }  # fmt: skip
        part = chosen.where(F.col("group") == group).drop("group")
        counts = write(
            spark,
            part,
            options,
            lambda tasks, total: progress("messages", manifest.messages * tasks // total, manifest.messages),
        )
        done.put += counts["put"]
        done.there += counts["there"]
    return done


def _is_past(now_ms: int) -> Column:
    return F.unix_millis("scheduled") <= now_ms


def _is_over(now_ms: int) -> Column:
    return F.coalesce(F.unix_millis("expires") <= now_ms, F.lit(False))


def _count(rows: DataFrame, now_ms: int, dead: str, done: Restored) -> None:
    living = F.col("died").isNull()
    found = rows.agg(
        F.count_if(living & _is_past(now_ms) & ~_is_over(now_ms)).alias("past"),
        F.count_if(~living).alias("dead"),
        F.count_if(_is_over(now_ms)).alias("expired"),
    ).head()  # fmt: skip
    assert found is not None
    done.skipped, done.expired = found["past"], found["expired"]
    done.dead = found["dead"] if dead == "skip" else 0


def _chosen(rows: DataFrame, now_ms: int, past: str, dead: str) -> DataFrame:
    """Return the messages of a backup that a restore puts."""
    chosen = rows.where(~_is_over(now_ms))
    if dead == "skip":
        chosen = chosen.where("died IS NULL")
    if past == "skip":
        chosen = chosen.where(~_is_past(now_ms) | F.col("died").isNotNull())
    return chosen


def _make_topic(addresses: str, name: str, manifest: Manifest) -> bool:
    """Makes the topic as it was; False when it is there."""
    with SparkConnection(addresses) as connection:
        try:
            connection.topic(name)
        except NotFound:
            plain = asdict(TopicSettings())
            told = asdict(manifest.topic_settings()).items()
            others = {setting: value for setting, value in told if value != plain[setting]}
            connection.run(connection.client.create_topic(name, **others))
            return True
    return False


def _check_others(spark: SparkSession, addresses: str, topic: str, rows: DataFrame) -> None:
    """Raises Invalid when the topic has messages that the backup has not."""
    there = read_topic(spark, addresses, topic, "id string")
    others = there.join(rows.select("id"), "id", "left_anti").limit(EXAMPLES).collect()
    if others:
        raise Invalid(
            f"topic {topic!r} has messages that are not of this backup, such as {others[0]['id']!r}: restore into "
            "another topic (--topic NAME), or into one that is empty"
        )


def verify(
    spark: SparkSession, addresses: str, url: str, topic: str = "", past: str = "refuse", dead: str = "skip"
) -> BackupComparison:
    """Holds the topic against the backup, message by message: scheduled time (unless it was past), tag, group, expiry,
    and content by its checksum."""
    manifest = read_manifest(url)
    now_ms = Clock().now_ms()
    ours = _chosen(data_of(spark, url, manifest.chunks), now_ms, past, dead)
    columns = "id string, scheduled timestamp, tag string, `group` string, expires timestamp, payload_sum long"
    theirs = read_topic(spark, addresses, topic or manifest.topic, columns)
    joined = ours.alias("a").join(theirs.alias("b"), F.col("a.id") == F.col("b.id"), "full_outer")
    wrong = [
        F.when(~F.col(f"a.{name}").eqNullSafe(F.col(f"b.{name}")), F.lit(name))
        for name in ("tag", "group", "expires", "payload_sum")
    ]
    moved = ~F.col("a.scheduled").eqNullSafe(F.col("b.scheduled")) & (F.unix_millis("a.scheduled") > manifest.taken_ms)
    why = (
        F.when(F.col("b.id").isNull(), F.lit("missing"))
        .when(F.col("a.id").isNull(), F.lit("extra"))
        .otherwise(F.concat_ws(" ", F.when(moved, F.lit("scheduled")), *wrong))
    )
    judged = joined.select(F.coalesce("a.id", "b.id").alias("id"), why.alias("why"))
    counts = {row["why"]: row["count"] for row in judged.groupBy("why").count().collect()}
    compared = BackupComparison(
        counts.pop("", 0), counts.pop("missing", 0), counts.pop("extra", 0), sum(counts.values())
    )
    for row in judged.where("why != ''").limit(EXAMPLES).collect():
        compared.examples[row["id"]] = row["why"]
    return compared
