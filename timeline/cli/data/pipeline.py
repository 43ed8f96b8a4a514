"""`timeline pipeline …`: data in and out at scale, on Spark."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from timeline.cli.app import DONE, REFUSED, SOME_FAILED, UNREACHABLE, Failed, Suggesting, debugs, needing, say
from timeline.cli.options import (
    Milliseconds,
    Url,
    address_option,
    credential_options,
    credentials,
    group_option,
    json_option,
    parse_time,
    shown_bytes,
    topic_names,
)
from timeline.cli.output import Progress, print_fields, print_json, print_table
from timeline.credentials import Credentials
from timeline.driver.times import shown_time
from timeline.errors import Invalid
from timeline.pipeline.connection import first_line
from timeline.storage_plugins import shown

_OURS = re.compile(r"timeline\.errors\.(\w+): (?:[A-Z_]+: )?(.+)")
text_option = functools.partial(click.option, default="", show_default=False)
RETRYABLE = ("Unavailable", "Unknown", "Throttled")


@dataclass(frozen=True, slots=True)
class SparkJob:
    """The options of a job: the broker's address, Spark's master and settings, and whether to print JSON."""

    address: str
    master: str
    settings: tuple[str, ...]
    as_json: bool

    @contextmanager
    def running(self, name: str, master: str = "") -> Iterator[Any]:
        """Yield a Spark session. Errors of Spark become one line."""
        with needing("spark", "pipelines need"):
            from timeline.pipeline.session import spark_session
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        # Spark would log pages about a failure that is one line here.
        pairs = {"spark.log.level": "ERROR" if debugs() else "FATAL"} | dict(map(pair, self.settings))
        try:
            spark = spark_session(f"timeline pipeline {name}", self.master or master, pairs)
        except (PySparkException, RuntimeError, OSError) as failed:
            needs = "It needs Java 17 (JAVA_HOME, or java on the PATH)"
            raise Failed(REFUSED, f"Spark does not start: {first_line(failed)}. {needs}") from failed
        try:
            yield spark
        except (PySparkException, Py4JError) as failed:
            kind, said = ours(failed)
            raise Failed(UNREACHABLE if kind in RETRYABLE else REFUSED, said) from failed
        except Invalid as bad:
            raise Failed(REFUSED, bad.reason) from bad
        finally:
            spark.stop()

    def tell(self, told: dict[str, Any]) -> None:
        """Print what a job did."""
        if self.as_json:
            print_json(told)
        else:
            print_fields(
                {name.replace("_", " "): f"{one:,}" if isinstance(one, int) else one for name, one in told.items()}
            )


def pipeline_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands: `--json --master --set --address` and `credential_options`."""

    @functools.wraps(command)
    def as_asked(address: str, master: str, settings: tuple[str, ...], as_json: bool, **given: Any) -> Any:
        with shown_to_workers(credentials()):
            return command(SparkJob(address, master, settings, as_json), **given)

    asked: Callable[..., Any] = as_asked
    for option in (
        json_option,
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Spark setting; repeatable."),
        text_option("--master", metavar="URL", help="Spark master. Default: local[*], or spark-submit's."),
        address_option,
    ):
        asked = option(asked)
    return credential_options(asked)


@contextmanager
def shown_to_workers(shown: Credentials) -> Iterator[None]:
    """Set credentials as variables of this process, which Spark's workers on this machine inherit. A query plan would
    show them. A token's text is a variable already, since no option takes it."""
    files = {"TLS_CA": shown.ca, "TLS_CERT": shown.cert, "TLS_KEY": shown.key, "TOKEN_FILE": shown.token_file}
    said = {f"TIMELINE_{name}": os.path.abspath(file) for name, file in files.items() if file}
    if shown.tls:
        said["TIMELINE_TLS"] = "true"
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def pair(setting: str, option: str = "--set") -> tuple[str, str]:
    """Return the two sides of NAME=VALUE. Raises BadParameter."""
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{setting!r} is no NAME=VALUE", param_hint=option)
    return name, value


def ours(failed: BaseException) -> tuple[str, str]:
    """Return class and reason of our error that Spark wraps as text, or no class and Spark's first line."""
    found = _OURS.findall(str(failed))
    return found[-1] if found else ("", first_line(failed))


class JobProgress:
    """Draws the progress of a job."""

    def __init__(self) -> None:
        self._what = ""
        self._progress: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._progress is None or what != self._what:
            self.clear()
            self._what, self._progress = what, Progress(what, total or None)
        self._progress.add(max(0, done - self._progress.done), done / total if total else None)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.clear()


@contextmanager
def watched() -> Iterator[JobProgress]:
    watch = JobProgress()
    try:
        yield watch
    finally:
        watch.clear()


@click.group(cls=Suggesting)
def pipeline() -> None:
    """Load, back up, restore, forecast and audit by the million, on Spark.

    Spark needs Java 17. It runs in this process on all cores, unless --master names a cluster. A command continues
    where an interrupted run stopped.

    \b
    Example:
      timeline pipeline load reminders.parquet reminders --dry-run \\
        --due due_at --payload "to_json(struct(*))" --id id
      timeline pipeline backup reminders file:///backups/reminders
    """


@pipeline.command()
@click.argument("source")
@click.argument("topic", shell_complete=topic_names)
@click.option("--format", "kind", default="parquet", help="How Spark reads SOURCE: parquet, csv, json …")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of that format; repeatable.")
@text_option("--where", metavar="SQL", help="Only these rows.")
@click.option("--due", metavar="SQL", help="Due time. Default: the column due.")
@click.option("--payload", metavar="SQL", help="Payload. Default: the column payload.")
@click.option("--id", metavar="SQL", help="Id. Default: the column id, or one made of the row.")
@click.option("--tag", metavar="SQL", help="Tag. Default: the column tag.")
@click.option("--headers", metavar="SQL", help="Headers, a map. Default: the column headers.")
@click.option("--expires", metavar="SQL", help="Expiry. Default: the column expires.")
@group_option
@click.option("--shift-to", metavar="TIME", help="Shift all due times so that the first is this time, or now.")
@click.option("--past", type=click.Choice(("reject", "now")), default="reject", help="Rows due before now.")
@click.option("--max-rejects", type=click.IntRange(0), default=0, help="Rows that may be rejected.")
@text_option("--rejects", metavar="URL", help="Folder for rejected rows.")
@click.option("--allow-identical", is_flag=True, help="Collapse identical rows without an id into one.")
@text_option("--state", metavar="URL", help="File that lets an interrupted run continue.")
@click.option("--dry-run", is_flag=True, help="Check the rows, print what would happen, produce nothing.")
@pipeline_command
def load(
    job: SparkJob, source: str, topic: str, kind: str, options: tuple[str, ...], shift_to: str | None, **asked: Any
) -> int:
    """Produce the rows of SOURCE, any table that Spark reads, into TOPIC.

    All rows are checked first: which cannot be produced, and the load that they add, with its spikes.

    \b
    Example:
      timeline pipeline load flights.parquet departures --id flight_id \\
        --due "timestamp_millis(sched_dep_ms)" --payload "to_json(struct(*))" \\
        --tag carrier --shift-to now
    """
    told = {name: asked.pop(name) for name in ("due", "payload", "id", "tag", "headers", "expires")}
    expressions = {name: sql for name, sql in told.items() if sql}
    shift_ms = parse_time(shift_to, "--shift-to").absolute_ms() if shift_to else 0
    with job.running("load") as spark, watched() as watch:
        from timeline.pipeline.jobs.load import LoadRequest
        from timeline.pipeline.jobs.load import load as run

        table = spark.read.format(kind).options(**dict(pair(each) for each in options)).load(source)
        wish = LoadRequest(job.address, topic, shift_to_ms=shift_ms, **asked)
        loaded = run(spark, table, wish, expressions, watch)
    _tell_load(loaded, topic, job.as_json)
    unclear = loaded.checked.identical and not wish.allow_identical
    return SOME_FAILED if loaded.rejected or (loaded.dry_run and (loaded.checked.rejected or unclear)) else DONE


def _tell_load(loaded: Any, topic: str, as_json: bool) -> None:
    checked = loaded.checked
    if as_json:
        told = dataclasses.asdict(loaded)
        told["checked"]["spikes"] = [dataclasses.asdict(spike) for spike in checked.spikes]
        print_json(told)
        return
    fields: dict[str, object] = {
        "rows": f"{checked.rows:,}, {shown_bytes(checked.payload_bytes)} of payload",
        "due": f"{shown_time(checked.first_ms)} to {shown_time(checked.last_ms)}" if checked.first_ms else "never",
    }
    for reason, count in checked.bad.items():
        fields[f"cannot be produced: {reason}"] = f"{count:,}"
    if checked.identical:
        fields["identical rows"] = f"{checked.identical:,}"
    if checked.conflicts:
        fields["ids used twice"] = f"{checked.conflicts:,}"
    if not loaded.dry_run:
        fields |= {
            "put": f"{loaded.put:,}",
            "there already": f"{loaded.there:,}",
            "delivered before": f"{loaded.settled:,}",
            "left out": f"{loaded.rejected:,}",
        }
    print_fields(fields)
    spikes = [(shown_time(spike.start_ms), f"{spike.count:,}") for spike in checked.spikes]
    if spikes:
        print_table((f"spikes, per {checked.step_ms // 1000} s from", "messages"), spikes, ("messages",), empty="")
    for warning in loaded.warnings:
        say(f"note: {warning}", err=True)
    if loaded.dry_run:
        say(f"nothing was put on {topic}: --dry-run")


@pipeline.command(name="load-schedules")
@click.argument("source")
@click.argument("topic", shell_complete=topic_names)
@click.option("--format", "kind", default="parquet", help="How Spark reads SOURCE: parquet, csv, json …")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of that format; repeatable.")
@text_option("--where", metavar="SQL", help="Only these rows.")
@click.option("--column", "columns", multiple=True, metavar="FIELD=SQL", help="A field of the schedules; repeatable.")
@click.option("--if-exists", type=click.Choice(("refuse", "replace")), default="refuse", help="Schedules that differ.")
@click.option("--max-rejects", type=click.IntRange(0), default=0, help="Rows that may be rejected.")
@text_option("--rejects", metavar="URL", help="Folder for rejected rows.")
@click.option("--dry-run", is_flag=True, help="Check the rows, print what would happen, create nothing.")
@pipeline_command
def load_schedules(
    job: SparkJob, source: str, topic: str, kind: str, options: tuple[str, ...], columns: tuple[str, ...], **asked: Any
) -> int:
    """Create a recurring schedule on TOPIC for each row of SOURCE, any table that Spark reads.

    Columns are the fields of a schedule: name; cron, every or rrule; exclude, start, end, count, zone, gap, fold,
    jitter, catch_up, window, overlap, payload, headers, tag, group, expires and paused. All rows are checked first. The
    same command again changes nothing.

    \b
    Example:
      timeline pipeline load-schedules tenants.parquet invoices --dry-run \\
        --column "name=concat('tenant-', id)" --column "cron='0 6 1 * *'" \\
        --column zone=time_zone --column "payload=to_json(struct(*))"
    """
    expressions = dict(pair(each, "--column") for each in columns)
    with job.running("load-schedules") as spark, watched() as watch:
        from timeline.pipeline.jobs.schedules import ScheduleLoad
        from timeline.pipeline.jobs.schedules import load_schedules as run

        table = spark.read.format(kind).options(**dict(pair(each) for each in options)).load(source)
        loaded = run(spark, table, ScheduleLoad(job.address, topic, **asked), expressions, watch)
    _tell_schedules(loaded, topic, job.as_json)
    return SOME_FAILED if loaded.rejected else DONE


def _tell_schedules(loaded: Any, topic: str, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(loaded))
        return
    counts = ("rows", "created", "there", "replaced", "rejected")
    print_fields({
        {"there": "there already"}.get(name, name): f"{getattr(loaded, name):,}" for name in counts
    })  # fmt: skip
    if loaded.reasons:
        rows = [(f"{count:,}", reason) for reason, count in loaded.reasons.items()]
        print_table(("rows", "why rejected"), rows, ("rows",), empty="")
    if loaded.ignored:
        say(f"note: these columns are no field of a schedule: {', '.join(loaded.ignored)}", err=True)
    if loaded.dry_run:
        say(f"nothing was created on {topic}: --dry-run")


@pipeline.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("url")
@click.option("--chunks", type=click.IntRange(1), default=8, help="Parts, written one after the other.")
@pipeline_command
def backup(job: SparkJob, topic: str, url: str, chunks: int) -> int:
    """Write TOPIC below URL, with payloads, dead letters, schedules and a manifest.

    \b
    Example:
      timeline pipeline backup departures file:///backups/departures
    """
    with job.running("backup") as spark, watched() as watch:
        from timeline.pipeline.jobs.backup import backup as run

        manifest = run(spark, job.address, topic, url, chunks, watch)
    if job.as_json:
        print_json(manifest.as_json())
    else:
        said = f"{manifest.messages:,}, {manifest.dead:,} of them dead letters"
        print_fields({
            "messages": said,
            "payloads": shown_bytes(manifest.payload_bytes),
            "schedules": f"{manifest.schedules:,}",
            "in": shown(url),
        })  # fmt: skip
    return DONE


@pipeline.command()
@click.argument("url")
@text_option("--topic", metavar="NAME", help="Target topic. Default: the topic of the backup.")
@click.option("--past", type=click.Choice(("refuse", "now", "skip")), default="refuse", help="Due before now.")
@click.option("--dead", type=click.Choice(("skip", "revive")), default="skip", help="Dead letters.")
@click.option(
    "--schedules",
    type=click.Choice(("refuse", "replace", "keep", "skip")),
    default="refuse",
    help="Schedules that differ from those of the topic. skip: restore none at all.",
)
@click.option("--dry-run", is_flag=True, help="Check the backup, print what would happen, produce nothing.")
@click.option("--verify", "verifies", is_flag=True, help="Produce nothing; compare the topic with the backup.")
@pipeline_command
def restore(
    job: SparkJob, url: str, topic: str, past: str, dead: str, schedules: str, dry_run: bool, verifies: bool
) -> int:
    """Produce the messages of the backup at URL into a topic, ids and scheduled times kept. Then create its schedules.

    A restored schedule goes on from now.

    \b
    Example:
      timeline pipeline restore file:///backups/trips --address new-broker:9000
      timeline pipeline restore file:///backups/trips --address new-broker:9000 \\
        --verify
    """
    with job.running("restore") as spark, watched() as watch:
        from timeline.pipeline.jobs import backup as jobs

        if not verifies:
            done = jobs.restore(spark, job.address, url, topic, past, dead, watch, schedules, dry_run)
            _tell_restored(job, done)
            return SOME_FAILED if done.settled else DONE
        compared = jobs.verify(spark, job.address, url, topic, past, dead, schedules)
    job.tell(dataclasses.asdict(compared))
    return DONE if compared.well else SOME_FAILED


def _tell_restored(job: SparkJob, done: Any) -> None:
    if job.as_json:
        print_json(dataclasses.asdict(done))
        return
    told = dataclasses.asdict(done) | {f"schedules {what}": count for what, count in done.schedules.counts().items()}
    del told["schedules"], told["dry_run"], told["warnings"]
    job.tell(told)
    for warning in done.warnings:
        say(f"note: {warning}", err=True)
    if done.dry_run:
        rows = [(name, what) for what, names in dataclasses.asdict(done.schedules).items() for name in names]
        print_table(("schedule", "would be"), rows, empty="no schedules")
        say(f"nothing was put on {done.topic}: --dry-run")


@pipeline.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--window", default="7d", type=Milliseconds(), help="How far to look ahead.")
@click.option("--step", default="1h", type=Milliseconds(), help="How much a step covers.")
@text_option("--journal", metavar="URL", help="Journal to learn from.")
@click.option(
    "--per-consumer", type=float, metavar="RATE", help="Settles per second of a consumer. Default: journal's."
)
@text_option("--html", metavar="URL", help="Page with pictures to write.")
@pipeline_command
def forecast(
    job: SparkJob, topic: str, window: int, step: int, journal: str, per_consumer: float | None, html: str
) -> int:
    """Forecast the load of TOPIC: what is pending and what will still come, with its band and the consumers needed.

    \b
    Example:
      timeline pipeline forecast departures --journal file:///var/journal \\
        --html forecast.html
    """
    with job.running("forecast") as spark, watched() as watch:
        from timeline.pipeline.files import write_bytes
        from timeline.pipeline.jobs.forecast import forecast as run
        from timeline.pipeline.jobs.forecast import forecast_page

        ahead = run(spark, job.address, topic, window, step, journal, per_consumer or 0.0, watch)
        if html:
            write_bytes(html, forecast_page(ahead).encode())
    if job.as_json:
        spikes = [dataclasses.asdict(one) for one in ahead.spikes]
        print_json(dataclasses.asdict(ahead) | {"consumers": ahead.consumers, "spikes": spikes})
        return DONE
    print_fields(
        {
            "pending": f"{sum(one.pending for one in ahead.steps):,}",
            "overdue": f"{ahead.overdue:,}",
            "weeks of history": ahead.weeks,
            "consumers needed": ahead.consumers or "not known: --per-consumer or --journal",
        }
    )
    rows = [(shown_time(one.start_ms), round(one.expected), round(one.low), round(one.high)) for one in ahead.spikes]
    print_table(
        ("spike from", "expected", "low", "high"), rows, ("expected", "low", "high"), empty="no step stands out"
    )
    return DONE


@pipeline.command()
@click.argument("journal")
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="Only this topic, as it is now; repeatable.")
@text_option("--backup", metavar="URL", help="Backup to use in place of what a broker has now.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Print this message's history; repeatable.")
@text_option("--html", metavar="URL", help="Page with plots to write.")
@pipeline_command
def audit(job: SparkJob, journal: str, topics: tuple[str, ...], backup: str, ids: tuple[str, ...], html: str) -> int:
    """Print what happened to every message, by the journal at JOURNAL, and whether the promises were kept.

    Exit code 1 when a promise was broken. Exit code 3 when the journal misses events, whose interval is printed, or has
    no event of a --topic. A broker writes a journal file per minute (its roll). Events that it has not written yet are
    unknown, so their messages are not called lost.

    \b
    Example:
      timeline pipeline audit file:///var/journal --topic trips --html audit.html
    """
    with job.running("audit") as spark, watched() as watch:
        from timeline.pipeline.files import write_bytes
        from timeline.pipeline.jobs.audit import STORIES, audit_page, not_known, pending_in
        from timeline.pipeline.jobs.audit import audit as run

        if len(set(ids)) > STORIES:
            raise click.UsageError(f"--id: {STORIES} stories can be told at once, not {len(set(ids))}")
        there = pending_in(spark, job.address, topics, backup)
        found = run(spark, journal, topics, there, ids, watch)
        if html:
            write_bytes(html, audit_page(found, shown(journal)).encode())
    if job.as_json:
        told = {"stories": _plain(found.stories), "examples": _plain(found.examples)}
        print_json({**dataclasses.asdict(found), "exit_code": found.exit_code, **told})
    else:
        for id in dict.fromkeys(ids):
            _tell_story(id, found.stories.get(id, []))
        print_fields({name.replace("_", " "): f"{count:,}" for name, count in found.messages.items()})
        rows = [(promise, f"{count:,}") for promise, count in found.broken.items()]
        print_table(("broken promise", "messages"), rows, ("messages",), empty=found.verdict)
        for sentence in not_known(found):
            say(f"not known: {sentence}")
    return found.exit_code


def _tell_story(id: str, events: Sequence[Mapping[str, Any]]) -> None:
    say(f"{id}:")
    rows = [
        (
            _told_time(one["time"]), one["kind"].replace("_", " "), one["topic"], one["version"],
            _told_time(one["due"]), one["consumer"] or "", one["cause"] or "",
        )
        for one in events
    ]  # fmt: skip
    heads = ("time", "event", "topic", "version", "due", "consumer", "cause or reason")
    print_table(heads, rows, ("version",), empty="the journal has no event of it")
    say("")


def _told_time(at: datetime | None) -> str:
    """Return a time of Spark, which is naive and in this machine's zone."""
    return "" if at is None else shown_time(round(at.timestamp() * 1_000.0))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


@pipeline.command()
@click.argument("journal")
@click.option("--older", default="2h", type=Milliseconds(0), help="Least age of an hour's start.")
@pipeline_command
def compact(job: SparkJob, journal: str, older: int) -> int:
    """Join the journal's many small files into few large ones.

    \b
    Example:
      timeline pipeline compact file:///var/journal
    """
    with job.running("compact") as spark:
        from timeline.pipeline.jobs.journal import compact as run

        done = run(spark, journal, older)
    job.tell(dataclasses.asdict(done))
    return DONE


@pipeline.command()
@click.argument("data")
@click.option("--into", metavar="FOLDER", help="Folder that keeps journal, backup and pages. Default: none.")
@click.option("--begins-in", default="90s", type=Milliseconds(0), help="Until the first departure.")
@click.option("--lasts", default="60s", type=Milliseconds(), help="From the first to the last departure.")
@pipeline_command
def year(job: SparkJob, data: str, into: str | None, begins_in: int, lasts: int) -> int:
    """Account for a year of departures: send DATA (flights_2013.parquet) through own brokers and all of the pipeline.

    \b
    Example:
      timeline pipeline year flights_2013.parquet --into year
    """
    with tempfile.TemporaryDirectory(prefix="timeline-year-") as scratch, job.running("year") as spark:
        from timeline.pipeline.jobs.year import year as run

        folder = Path(into or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with watched() as watch:
            account = asyncio.run(run(spark, data, folder, watch, begins_in, lasts))
    if job.as_json:
        sheet = [{"what": what, "found": found, "wanted": wanted} for what, found, wanted in account.sheet]
        print_json({"balanced": account.balanced, "seconds": account.seconds, "sheet": sheet})
    else:
        rows = [(what, f"{found:,}", f"{wanted:,}") for what, found, wanted in account.sheet]
        print_table(("of the year's departures", "found", "must be"), rows, ("found", "must be"), empty="")
        print_fields({step: f"{seconds:.1f} s" for step, seconds in account.seconds.items()})
        say("every departure is accounted for" if account.balanced else "the account does not balance")
    return DONE if account.balanced else SOME_FAILED


@pipeline.command()
@click.option("--rows", type=click.IntRange(1), default=1_000_000, help="Rows to load.")
@click.option("--payload-bytes", type=click.IntRange(1, 1 << 20), default=100, help="Payload of each row.")
@click.option("--store", default="memory://", type=Url(), help="Store that rows are loaded into.")
@click.option("--restore-into", default="memory://", type=Url(), help="Store that they are restored into.")
@click.option(
    "--parallel",
    "degrees",
    type=click.IntRange(1, 1024),
    multiple=True,
    default=(2,),
    metavar="N",
    help="Tasks at a time; repeatable.",
)
@pipeline_command
def measure(
    job: SparkJob, rows: int, payload_bytes: int, store: str, restore_into: str, degrees: tuple[int, ...]
) -> int:
    """Measure load, scan, backup and restore in rows per second, beside the same rows written as Parquet.

    It starts own brokers; --store sqlite:// is a fresh file. Per row, it prints the processor time of Spark's engine,
    its Python workers and the broker.

    \b
    Example:
      timeline pipeline measure --parallel 1 --parallel 2 --parallel 4
      timeline pipeline measure --rows 10000000 --store sqlite:// \\
        --set spark.driver.memory=1g --json
    """
    found = []
    for parallel in degrees:
        with (
            tempfile.TemporaryDirectory(prefix="timeline-measure-") as scratch,
            job.running("measure", f"local[{parallel}]") as spark,
        ):
            from timeline.bench.suite import fresh
            from timeline.pipeline.jobs.measure import measure as run

            folder = Path(scratch)
            stores = fresh(store, folder, "one"), fresh(restore_into, folder, "two")
            found.append(asyncio.run(run(spark, folder, *stores, rows, payload_bytes, parallel)))
    if job.as_json:
        print_json({"runs": [dataclasses.asdict(one) for one in found]})
    for one in found if not job.as_json else ():
        _tell_measured(one)
    return SOME_FAILED if any(one.wrong for one in found) else DONE


def _tell_measured(figures: Any) -> None:
    print_fields({
        "rows": f"{figures.rows:,}",
        "tasks at a time": figures.parallel,
        "store": figures.store,
        "checks of the load": f"{figures.looked_s:.1f} s",
        "broker after the load": f"{figures.broker_mib:,} MiB",
    })  # fmt: skip
    numbers = ("seconds", "rows/s", "engine", "workers", "broker", "engine MiB", "driver MiB", "a worker MiB")
    rows = [
        (
            name, f"{step.seconds:.1f}", f"{step.rows_per_s:,.0f}", f"{step.engine_us:.1f}", f"{step.workers_us:.1f}",
            f"{step.brokers_us:.1f}", _span(step.engine_mib), _span(step.driver_mib), f"{step.workers_mib}",
        )
        for name, step in figures.steps.items()
    ]  # fmt: skip
    print_table(("step, processor time in µs a row", *numbers), rows, numbers, empty="")
    for wrong in figures.wrong:
        say(f"WRONG: {wrong}")


def _span(points: list[int]) -> str:
    return f"{points[0]} → {points[-1]}, most {max(points)}" if points else ""
