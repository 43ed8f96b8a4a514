"""The jobs `backup` and `restore`: a topic, with payloads and dead letters, → Parquet with a manifest → any store.

    URL/manifest.json               what the backup is of, what is in it, and checksums
    URL/chunks/0003.json            what chunk 3 has; there once it is written
    URL/data/chunk=0003/*.parquet   messages of some buckets
    URL/schedules.json              recurring schedules of the topic: see `saved_schedules`

The backup goes through the topic's buckets in chunks. Written chunks stay, so a backup that died continues with the
next one. A backup without a manifest was never finished. If the manifest does not fit the files, the backup is damaged
or was changed. Each bucket is saved as it was when it was read. For one instant of a topic, pause it.

A restore keeps ids and scheduled times. It creates the topic if it is missing, and refuses one with other messages. If
the topic has some of the backup's messages, the restore broke off, and continues. Dead letters stay in the backup
unless they are to be revived.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.errors import Invalid, NotFound, TimelineError
from timeline.model import Topic, TopicSettings
from timeline.pipeline.connection import SparkConnection, first_line
from timeline.pipeline.files import joined, read_json, write_json
from timeline.pipeline.jobs.load import write
from timeline.pipeline.jobs.saved_schedules import (
    EXISTING,
    RestoredSchedules,
    plan_schedules,
    restore_schedules,
    save_schedules,
    saved_schedules,
    standing_schedules,
)
from timeline.pipeline.session import Progress, quiet, read_topic, watched
from timeline.pipeline.source.columns import read_schema
from timeline.schedules import Specification
from timeline.storage_plugins import shown

VERSION = 1
CHUNKS = 8
KEPT = ("id", "scheduled", "tag", "group", "expires", "died", "dead", "payload_sum", "payload", "headers")
"""Columns that must be the same after a restore. The others say how the message was."""
PAST = ("refuse", "now", "skip")
DEAD = ("skip", "revive")
EXAMPLES = 10
OCCURRENCE = r"^([A-Za-z0-9._-]+)@[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z(\.[0-9a-z]+)?$"
"""The form of the ids of a schedule's messages."""


@dataclass
class Chunk:
    """A part of a backup: the messages of the buckets in [first, end)."""

    number: int
    first: int
    end: int
    messages: int = 0
    dead: int = 0
    payload_bytes: int = 0
    checksum: str = ""


@dataclass
class Manifest:
    """The content of a backup. `taken_ms`, `until_ms`: when it began and ended. `schedules`: how many, and
    `schedules_checksum` of their file; empty: the backup is of a Timeline that knew none."""

    topic: str
    uid: str
    settings: dict[str, Any]
    taken_ms: int
    chunks: list[Chunk] = field(default_factory=list)
    until_ms: int = 0
    schedules: int = 0
    schedules_checksum: str = ""
    version: int = VERSION
    complete: bool = False

    @property
    def messages(self) -> int:
        """The number of messages, dead letters included."""
        return sum(chunk.messages for chunk in self.chunks)

    @property
    def dead(self) -> int:
        """The number of dead letters."""
        return sum(chunk.dead for chunk in self.chunks)

    @property
    def payload_bytes(self) -> int:
        """The size of all payloads."""
        return sum(chunk.payload_bytes for chunk in self.chunks)

    def as_json(self) -> dict[str, Any]:
        """Return the manifest's file."""
        return asdict(self) | {"messages": self.messages, "dead": self.dead, "payload_bytes": self.payload_bytes}

    def topic_settings(self) -> TopicSettings:
        """Return the topic's settings of then. Raise Invalid if they are damaged."""
        return TopicSettings(**self.settings).check()


def read_manifest(url: str) -> Manifest:
    """Return the manifest of a finished backup. Raise Invalid if there is none, or if it is damaged."""
    told = read_json(joined(url, "manifest.json"))
    if told is None:
        raise Invalid(
            f"{shown(url)} has no manifest: it is no backup, or one that was not finished. The same backup again "
            "continues it"
        )
    if not isinstance(told, dict) or told.get("version") != VERSION or not told.get("complete"):
        raise Invalid(f"the manifest of {shown(url)} is not one of version {VERSION} of a finished backup")
    names = ("topic", "uid", "settings", "taken_ms", "until_ms")
    later = {name: told[name] for name in ("schedules", "schedules_checksum") if name in told}
    try:
        chunks = [chunk for told_of in told["chunks"] if (chunk := chunk_of(told_of, url))]
        read = Manifest(**{name: told[name] for name in names}, **later, chunks=chunks, complete=True)
        read.topic_settings()
    except (KeyError, TypeError, TimelineError) as bad:
        raise Invalid(f"the manifest of {shown(url)} was changed or is damaged: {bad}") from bad
    return read


def chunk_of(told: Any, url: str) -> Chunk | None:
    """Return the chunk of the JSON in `url`; None for null. Raise Invalid if it is damaged."""
    if told is None:
        return None
    try:
        chunk = Chunk(**told)
    except TypeError as bad:
        raise Invalid(f"{shown(url)} is damaged: it tells of no chunk") from bad
    numbers = (chunk.number, chunk.first, chunk.end, chunk.messages, chunk.dead, chunk.payload_bytes)
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(chunk.checksum, str):
        raise Invalid(f"{shown(url)} is damaged: its chunk has {chunk}")
    return chunk


def measure(rows: DataFrame, chunk: Chunk) -> Chunk:
    """Return `chunk` with the figures of `rows`: messages, dead letters, bytes of payload, and a checksum over the
    columns `KEPT`."""
    one = F.xxhash64(*(F.col(name) if name != "headers" else F.to_json("headers") for name in KEPT))
    # Two sums: at least one of them shows rows that were exchanged, or that are there twice.
    found = rows.agg(
        F.count("*").alias("messages"),
        F.count("died").alias("dead"),
        F.coalesce(F.sum(F.octet_length("payload").cast("long")), F.lit(0)).alias("payload_bytes"),
        F.coalesce(F.hex(F.bit_xor(one)), F.lit("0")).alias("xor"),
        F.coalesce(F.sum(one.cast("decimal(38,0)")), F.lit(0)).cast("string").alias("sum"),
    ).head()
    assert found is not None
    counts = {name: found[name] for name in ("messages", "dead", "payload_bytes")}
    return replace(chunk, **counts, checksum=f"{found['xor']}-{found['sum']}")


def data_of(spark: SparkSession, url: str, chunks: Sequence[Chunk]) -> DataFrame:
    """Return the messages of `chunks`."""
    schema = read_schema(payload=True)
    if not chunks:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*(chunk_path(url, chunk) for chunk in chunks))


def chunk_path(url: str, chunk: Chunk) -> str:
    """Return the folder of a chunk's files."""
    return joined(url, "data", f"chunk={chunk.number:04d}")


def check_files(spark: SparkSession, url: str, manifest: Manifest) -> None:
    """Raise Invalid if the files are not those of the manifest."""
    for chunk in manifest.chunks:
        if not chunk.messages:
            continue
        try:
            found = measure(data_of(spark, url, [chunk]), chunk)
        except (PySparkException, Py4JError) as trouble:
            raise Invalid(f"chunk {chunk.number} of {shown(url)} cannot be read: {first_line(trouble)}") from trouble
        if found != chunk:
            raise Invalid(
                f"chunk {chunk.number} of {shown(url)} is not what its manifest says: {found.messages} messages "
                f"with checksum {found.checksum}, not {chunk.messages} with {chunk.checksum}. "
                "The backup was changed or is damaged"
            )


def backup(
    spark: SparkSession, addresses: str, topic: str, url: str, chunks: int = CHUNKS, progress: Progress = quiet
) -> Manifest:
    """Write the topic's messages below `url`, and return the manifest. Raise Invalid if another backup is there,
    NotFound, or Unavailable. The same call continues after the last written chunk. `chunks`: 1 or more."""
    if chunks < 1:
        raise Invalid(f"chunks must be 1 or more, not {chunks}")
    with SparkConnection(addresses) as connection:
        record = connection.topic(topic)
    manifest = Manifest(record.name, str(record.uid), asdict(record.settings), Clock().now_ms())
    manifest.taken_ms = _check_place(url, manifest)
    begun = {"topic": manifest.topic, "uid": manifest.uid, "taken_ms": manifest.taken_ms}
    write_json(joined(url, "topic.json"), begun)
    with SparkConnection(addresses) as connection:
        manifest.schedules, manifest.schedules_checksum = save_schedules(connection, topic, url)
    buckets = record.settings.buckets
    count = min(chunks, buckets)
    edges = [buckets * part // count for part in range(count + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(edges)):
        progress("chunks written", number, count)
        marker = joined(url, "chunks", f"{number:04d}.json")
        chunk = chunk_of(read_json(marker), marker)
        if chunk is None or (chunk.first, chunk.end) != (first, end):
            chunk = _write(spark, addresses, topic, url, Chunk(number, first, end))
            write_json(marker, asdict(chunk))
        manifest.chunks.append(chunk)
    progress("chunks written", count, count)
    manifest.until_ms, manifest.complete = Clock().now_ms(), True
    write_json(joined(url, "manifest.json"), manifest.as_json())
    return manifest


def _check_place(url: str, manifest: Manifest) -> int:
    """Return when the backup at `url` began: now, or when a run that died began. Raise Invalid for another backup."""
    if read_json(joined(url, "manifest.json")) is not None:
        raise Invalid(f"{shown(url)} has a finished backup already: name another place")
    there = read_json(joined(url, "topic.json"))
    if there is None:
        return manifest.taken_ms
    if not isinstance(there, dict):
        raise Invalid(f"{shown(url)} has something else than a backup: name another place")
    if (there.get("topic"), there.get("uid")) != (manifest.topic, manifest.uid):
        raise Invalid(f"{shown(url)} has part of a backup of topic {there.get('topic')!r}: name another place")
    return int(there.get("taken_ms", manifest.taken_ms))


def _write(spark: SparkSession, addresses: str, topic: str, url: str, chunk: Chunk) -> Chunk:
    rows = read_topic(spark, addresses, topic, read_schema(payload=True), buckets=f"{chunk.first}-{chunk.end}")
    writer = rows.write.mode("overwrite").option("compression", "zstd")
    watched(spark, lambda: writer.parquet(chunk_path(url, chunk)), lambda done, total: None)
    # Measure the files, not the rows on their way to them.
    return measure(data_of(spark, url, [chunk]), chunk)


@dataclass
class Restored:
    """The result of a restore. `settled`: messages whose ids the topic remembers as settled, which it does not take
    again. `skipped`: messages that were due by then. `dead`: dead letters that were left out. `expired`: messages whose
    expiry was over. `made`: whether it created the topic. `warnings`: consequences that
    users may not expect. With
    `dry_run`, nothing was put: `put` messages and `schedules` would be, less those that are remembered."""

    topic: str
    messages: int
    put: int = 0
    there: int = 0
    settled: int = 0
    skipped: int = 0
    dead: int = 0
    expired: int = 0
    made: bool = False
    warnings: list[str] = field(default_factory=list)
    schedules: RestoredSchedules = field(default_factory=RestoredSchedules)
    dry_run: bool = False


@dataclass
class BackupComparison:
    """The topic compared with the backup: messages that are the same, `missing` in the topic, `extra` there, or
    `differing`. `produced`: extra ones that the backup's schedules have produced since. Of schedules the same, `same`
    and so on. `examples`: the difference by id, for some."""

    same: int = 0
    missing: int = 0
    extra: int = 0
    differing: int = 0
    produced: int = 0
    schedules_same: int = 0
    schedules_missing: int = 0
    schedules_extra: int = 0
    schedules_differing: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        """Whether both sides are the same."""
        schedules = self.schedules_missing or self.schedules_extra or self.schedules_differing
        return not (self.missing or self.extra or self.differing or schedules)


def restore(
    spark: SparkSession,
    addresses: str,
    url: str,
    topic: str = "",
    past: str = "refuse",
    dead: str = "skip",
    progress: Progress = quiet,
    schedules: str = "refuse",
    dry_run: bool = False,
) -> Restored:
    """Put the messages of the backup at `url` on `topic`; empty: the backup's topic. Then create its schedules. `past`:
    for messages that are due by now. `schedules`: for those that differ from schedules of the topic. Raise Invalid if
    the backup is damaged, if the topic has other messages or schedules, or if `past` is "refuse" and some are due."""
    if past not in PAST or dead not in DEAD or schedules not in EXISTING:
        raise Invalid(
            f"past is one of {', '.join(PAST)}, dead one of {', '.join(DEAD)}, schedules one of {', '.join(EXISTING)}"
        )
    manifest = read_manifest(url)
    progress("checking the backup", 0, 0)
    check_files(spark, url, manifest)
    saved = saved_schedules(url, manifest.schedules, manifest.schedules_checksum)
    rows = data_of(spark, url, manifest.chunks)
    done = Restored(topic or manifest.topic, manifest.messages, dry_run=dry_run)
    now_ms = Clock().now_ms()
    _count(rows, now_ms, dead, done)
    if past == "refuse" and done.skipped:
        raise Invalid(
            f"{done.skipped:,} of {manifest.messages:,} messages are due by now. Restore them as due now (--past now), "
            "or leave them out (--past skip)"
        )
    with SparkConnection(addresses) as connection:
        standing = _standing(connection, done.topic)
        done.made = standing is None
        done.schedules = plan_schedules(connection, "" if done.made else done.topic, saved, schedules)
        if done.made and not dry_run:
            _make_topic(connection, done.topic, manifest)
    if not done.made:
        _check_others(spark, addresses, done.topic, rows, saved)
    settings = manifest.topic_settings() if standing is None else standing.settings
    if done.skipped and past == "now" and not settings.remember_ms:
        done.warnings.append(
            f"topic {done.topic!r} remembers nothing. A restore that breaks off and is run again sends messages that "
            f"were delivered meanwhile once more (timeline topic update {done.topic} --remember 1d)"
        )
    due = F.col("scheduled").alias("due")
    chosen = _chosen(rows, now_ms, past, dead).select("id", due, "payload", "tag", "headers", "expires", "group")
    done.skipped = done.skipped if past == "skip" else 0
    if dry_run:
        done.put = chosen.count()
        return done
    _put(spark, addresses, manifest, chosen, done, progress)
    if done.settled:
        done.warnings.append(
            f"topic {done.topic!r} remembers {done.settled:,} of these ids as settled or cancelled, and did not take "
            "them again. If they must be delivered again, restore into another topic (--topic)"
        )
    with SparkConnection(addresses) as connection:
        restore_schedules(connection, done.topic, saved, done.schedules)
    return done


def _put(
    spark: SparkSession, addresses: str, manifest: Manifest, chosen: DataFrame, done: Restored, progress: Progress
) -> None:
    for (group,) in sorted(chosen.select("group").distinct().collect()):
        options = {
            "addresses": addresses, "topic": done.topic, "group": group, "past": "now",
            "run": f"restore-{manifest.uid}",
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
        done.settled += counts["settled"]


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


def _standing(connection: SparkConnection, name: str) -> Topic | None:
    try:
        return connection.topic(name)
    except NotFound:
        return None


def _make_topic(connection: SparkConnection, name: str, manifest: Manifest) -> None:
    """Create the topic as it was."""
    plain = asdict(TopicSettings())
    told = asdict(manifest.topic_settings()).items()
    others = {setting: value for setting, value in told if value != plain[setting]}
    connection.run(connection.client.create_topic(name, **others))


def _check_others(
    spark: SparkSession, addresses: str, topic: str, rows: DataFrame, saved: Sequence[Specification]
) -> None:
    """Raise Invalid if the topic has messages that neither the backup has nor its schedules have produced since."""
    there = read_topic(spark, addresses, topic, "id string").where(~_is_produced("id", saved))
    others = there.join(rows.select("id"), "id", "left_anti").limit(EXAMPLES).collect()
    if others:
        raise Invalid(
            f"topic {topic!r} has messages that are not of this backup, such as {others[0]['id']!r}. Restore into "
            "another topic (--topic NAME), or into one that is empty"
        )


def _is_produced(id: str, saved: Sequence[Specification]) -> Column:
    """Return whether an id has the form of an occurrence of one of these schedules."""
    return F.regexp_extract(id, OCCURRENCE, 1).isin([one.name for one in saved]) if saved else F.lit(False)


def verify(
    spark: SparkSession,
    addresses: str,
    url: str,
    topic: str = "",
    past: str = "refuse",
    dead: str = "skip",
    schedules: str = "refuse",
) -> BackupComparison:
    """Compare the topic with the backup, message by message.

    Scheduled times must agree unless they were past. So must tag, group, expiry and the content's checksum. A message
    that died since differs. The specifications of schedules are compared, unless `schedules` is "skip". Dead letters
    that a restore skips may still be there.
    """
    manifest = read_manifest(url)
    saved = saved_schedules(url, manifest.schedules, manifest.schedules_checksum)
    now_ms = Clock().now_ms()
    saved_rows = data_of(spark, url, manifest.chunks)
    ours = _chosen(saved_rows, now_ms, past, dead)
    columns = "id string, scheduled timestamp, tag string, `group` string, expires timestamp, payload_sum long"
    theirs = read_topic(spark, addresses, topic or manifest.topic, f"{columns}, died timestamp")
    if dead == "skip":
        skipped = saved_rows.where("died IS NOT NULL").select("id")
        dead_still = theirs.where("died IS NOT NULL").join(skipped, "id", "left_semi").select("id")
        theirs = theirs.join(dead_still, "id", "left_anti")
    dead_now = F.col("b.died").isNotNull()
    both = ours.alias("a").join(theirs.alias("b"), F.col("a.id") == F.col("b.id"), "full_outer")
    wrong = [
        F.when(~F.col(f"a.{name}").eqNullSafe(F.col(f"b.{name}")), F.lit(name))
        for name in ("tag", "group", "expires", "payload_sum")
    ]
    moved = ~F.col("a.scheduled").eqNullSafe(F.col("b.scheduled")) & (F.unix_millis("a.scheduled") > manifest.taken_ms)
    why = (
        F.when(F.col("b.id").isNull(), F.lit("missing"))
        .when(F.col("a.id").isNull() & _is_produced("b.id", saved), F.lit("produced"))
        .when(F.col("a.id").isNull(), F.lit("extra"))
        .otherwise(F.concat_ws(" ", F.when(dead_now, F.lit("dead")), F.when(moved, F.lit("scheduled")), *wrong))
    )
    judged = both.select(F.coalesce("a.id", "b.id").alias("id"), why.alias("why"))
    counts = {row["why"]: row["count"] for row in judged.groupBy("why").count().collect()}
    produced = counts.pop("produced", 0)
    compared = BackupComparison(
        counts.pop("", 0), counts.pop("missing", 0), counts.pop("extra", 0), sum(counts.values()), produced
    )
    if schedules != "skip":
        _compare_schedules(addresses, topic or manifest.topic, saved, compared)
    for row in judged.where("why NOT IN ('', 'produced')").limit(EXAMPLES).collect():
        compared.examples[row["id"]] = row["why"]
    return compared


def _compare_schedules(addresses: str, topic: str, saved: Sequence[Specification], compared: BackupComparison) -> None:
    with SparkConnection(addresses) as connection:
        standing = standing_schedules(connection, topic)
    for one in saved:
        other = standing.get(one.name)
        what = "missing" if other is None else "same"
        if other is not None and other.specification != replace(one, topic=topic):
            what = "differing"
        _note(compared, what, one.name)
    for name in sorted(standing.keys() - {one.name for one in saved}):
        _note(compared, "extra", name)


def _note(compared: BackupComparison, what: str, name: str) -> None:
    count = f"schedules_{what}"
    setattr(compared, count, getattr(compared, count) + 1)
    if what != "same" and len(compared.examples) < EXAMPLES:
        compared.examples[f"schedule {name}"] = what
