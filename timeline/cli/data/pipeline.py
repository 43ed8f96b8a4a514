"""`timeline pipeline`: data in and out at scale, on Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from timeline.cli.app import DONE, SOME_FAILED, Suggesting, say
from timeline.cli.data.pipeline_trials import measure, year
from timeline.cli.data.spark import pair, pipeline_command, running, watched
from timeline.cli.options.client_options import topic_names
from timeline.cli.options.values import DURATION, parse_time, shown_bytes
from timeline.cli.terminal.output import print_fields, print_json, print_table
from timeline.driver.times import duration_ms, shown_time
from timeline.storage_plugins import shown


@click.group(cls=Suggesting)
def pipeline() -> None:
    """Load, back up, restore, forecast and audit by the million, on Spark.

    Spark runs in this process on all cores unless --master names a cluster; it needs Java 17. Each command goes on
    where a run that died was.

    \b
    Example:
      timeline pipeline load reminders.parquet reminders --due due_at --payload "to_json(struct(*))" --id id --dry-run
      timeline pipeline backup reminders file:///backups/reminders
    """


@pipeline.command()
@click.argument("source")
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--format", "kind", default="parquet", show_default=True, help="How Spark reads SOURCE: parquet, csv, json …"
)
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of that format; repeatable.")
@click.option("--where", metavar="SQL", help="Only these rows.")
@click.option("--due", metavar="SQL", help="When each is due.  [the column due]")
@click.option("--payload", metavar="SQL", help="What it carries.  [the column payload]")
@click.option("--id", "id", metavar="SQL", help="Its id.  [the column id, else made of the row]")
@click.option("--tag", metavar="SQL", help="Its tag.  [the column tag]")
@click.option("--headers", metavar="SQL", help="Its headers, a map.  [the column headers]")
@click.option("--expires", metavar="SQL", help="When it expires.  [the column expires]")
@click.option("--group", default="default", show_default=True, help="The producer group that owns the messages.")
@click.option("--shift-to", metavar="TIME", help="Move all in time so that the first is due then: now, or a time.")
@click.option(
    "--past", type=click.Choice(("reject", "now")), default="reject", show_default=True, help="What is due by now."
)
@click.option("--max-rejects", default=0, show_default=True, help="Rows that may be left out.")
@click.option("--rejects", default="", metavar="URL", help="Keep rows that are left out here.")
@click.option("--allow-identical", is_flag=True, help="Rows without an id that are identical collapse into one.")
@click.option("--state", default="", metavar="URL", help="A file by which a run that died goes on.")
@click.option("--dry-run", is_flag=True, help="Look at the rows, say what would be, put nothing.")
@pipeline_command
def load(
    source: str, topic: str, kind: str, options: tuple[str, ...], where: str | None, due: str | None,
    payload: str | None, id: str | None, tag: str | None, headers: str | None, expires: str | None,
    shift_to: str | None, state: str, address: str, master: str, settings: tuple[str, ...], as_json: bool, **asked: Any,
) -> int:  # fmt: skip
    """Put the rows of SOURCE, any table that Spark reads, on TOPIC.

    All rows are looked at first: what cannot be put, and the load that they add, with its spikes.

    \b
    Example:
      timeline pipeline load flights.parquet departures --id flight_id \\
        --due "timestamp_millis(sched_dep_ms)" --payload "to_json(struct(*))" --tag carrier --shift-to now
    """
    told = {"due": due, "payload": payload, "id": id, "tag": tag, "headers": headers, "expires": expires}
    expressions = {name: sql for name, sql in told.items() if sql}
    shift_ms = 0
    if shift_to:
        shift_ms = parse_time(shift_to, "--shift-to").absolute_ms()
    with running("load", master, settings) as spark, watched() as watch:
        from timeline.pipeline.jobs.load import LoadRequest
        from timeline.pipeline.jobs.load import load as run

        table = spark.read.format(kind).options(**dict(pair(each) for each in options)).load(source)
        wish = LoadRequest(address, topic, shift_to_ms=shift_ms, state=state, where=where or "", **asked)
        loaded = run(spark, table, wish, expressions, watch)
    _tell_load(loaded, topic, as_json)
    return SOME_FAILED if loaded.rejected else DONE


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
        fields[f"cannot be put: {reason}"] = f"{count:,}"
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


@pipeline.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("url")
@click.option("--chunks", default=8, show_default=True, help="Parts that are written one after the other.")
@pipeline_command
def backup(
    topic: str, url: str, chunks: int, address: str, master: str, settings: tuple[str, ...], as_json: bool
) -> int:
    """Write TOPIC, payloads and dead letters included, below URL, with a manifest.

    \b
    Example:
      timeline pipeline backup departures file:///backups/departures
    """
    with running("backup", master, settings) as spark, watched() as watch:
        from timeline.pipeline.jobs.backup import backup as run

        manifest = run(spark, address, topic, url, chunks, watch)
    if as_json:
        print_json(manifest.as_json())
    else:
        said = f"{manifest.messages:,}, {manifest.dead:,} of them dead letters"
        print_fields({"messages": said, "payloads": shown_bytes(manifest.payload_bytes), "in": shown(url)})
    return DONE


@pipeline.command()
@click.argument("url")
@click.option("--topic", default="", metavar="NAME", help="Into this topic.  [the one it was of]")
@click.option(
    "--past",
    type=click.Choice(("refuse", "now", "skip")),
    default="refuse",
    show_default=True,
    help="What is due by now.",
)
@click.option("--dead", type=click.Choice(("skip", "revive")), default="skip", show_default=True, help="Dead letters.")
@click.option("--verify", "verifies", is_flag=True, help="Put nothing: hold the topic against the backup.")
@pipeline_command
def restore(
    url: str, topic: str, past: str, dead: str, verifies: bool, address: str, master: str, settings: tuple[str, ...],
    as_json: bool,
) -> int:  # fmt: skip
    """Put the messages of the backup at URL on a topic, ids and scheduled times kept.

    \b
    Example:
      timeline pipeline restore file:///backups/departures --address new-broker:9000
      timeline pipeline restore file:///backups/departures --address new-broker:9000 --verify
    """
    with running("restore", master, settings) as spark, watched() as watch:
        from timeline.pipeline.jobs import restore as jobs

        if not verifies:
            done = jobs.restore(spark, address, url, topic, past, dead, watch)
            _tell(dataclasses.asdict(done), as_json)
            return DONE
        compared = jobs.verify(spark, address, url, topic, past, dead)
    _tell(dataclasses.asdict(compared), as_json)
    return DONE if compared.well else SOME_FAILED


def _tell(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(told)
    else:
        print_fields(
            {name.replace("_", " "): f"{value:,}" if isinstance(value, int) else value for name, value in told.items()}
        )


@pipeline.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--window", default="7d", show_default=True, type=DURATION, help="How far to look ahead.")
@click.option("--step", default="1h", show_default=True, type=DURATION, help="How much a step covers.")
@click.option("--journal", default="", metavar="URL", help="Learn from this journal.")
@click.option(
    "--per-consumer", default=0.0, metavar="RATE", help="What a consumer settles a second.  [as the journal shows]"
)
@click.option("--html", default="", metavar="URL", help="Write a page with pictures.")
@pipeline_command
def forecast(
    topic: str, window: str, step: str, journal: str, per_consumer: float, html: str, address: str, master: str,
    settings: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Reckon the load ahead of TOPIC: what is pending, what is still to be put, its band, the consumers it takes.

    \b
    Example:
      timeline pipeline forecast departures --journal file:///var/journal --html forecast.html
    """
    spans = duration_ms(window, "--window", least_ms=1), duration_ms(step, "--step", least_ms=1)
    with running("forecast", master, settings) as spark, watched() as watch:
        from timeline.pipeline.files import write_bytes
        from timeline.pipeline.jobs.forecast import forecast as run
        from timeline.pipeline.jobs.forecast import forecast_page

        ahead = run(spark, address, topic, *spans, journal, per_consumer, watch)
        if html:
            write_bytes(html, forecast_page(ahead).encode())
    if as_json:
        print_json(
            dataclasses.asdict(ahead)
            | {"consumers": ahead.consumers, "spikes": [dataclasses.asdict(one) for one in ahead.spikes]}
        )
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
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME",
    help="Only this topic, whose broker is asked what is still there; repeatable.",
)
@click.option("--backup", default="", metavar="URL", help="What was still there, instead of asking a broker.")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Tell this message's story; repeatable.")
@click.option("--html", default="", metavar="URL", help="Write a page with plots.")
@pipeline_command
def audit(
    journal: str, topics: tuple[str, ...], backup: str, ids: tuple[str, ...], html: str, address: str, master: str,
    settings: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Tell what happened to every message, out of the journal at JOURNAL, and whether the promises were kept.

    Ends with 1 when one was broken, with 3 when events are missing in the journal, whose interval it then names, or
    when it has none of a topic that is asked for: a broker that runs writes a file each minute (its journal's roll).
    What it has not written yet is not known either: what may be there is not called lost.

    \b
    Example:
      timeline pipeline audit file:///var/journal --topic departures --html audit.html
    """
    with running("audit", master, settings) as spark, watched() as watch:
        from timeline.pipeline.files import write_bytes
        from timeline.pipeline.jobs.audit import STORIES, audit_page, silence
        from timeline.pipeline.jobs.audit import audit as run
        from timeline.pipeline.jobs.stories import pending_in

        if len(set(ids)) > STORIES:
            raise click.UsageError(f"--id: {STORIES} stories can be told at once, not {len(set(ids))}")
        there = pending_in(spark, address, topics, backup)
        found = run(spark, journal, topics, there, ids, watch)
        if html:
            write_bytes(html, audit_page(found, shown(journal)).encode())
    if as_json:
        print_json(
            {
                **dataclasses.asdict(found),
                "exit_code": found.exit_code,
                "stories": _plain(found.stories),
                "examples": _plain(found.examples),
            }
        )
    else:
        for id in dict.fromkeys(ids):
            _tell_story(id, found.stories.get(id, []))
        print_fields({name.replace("_", " "): f"{count:,}" for name, count in found.messages.items()})
        rows = [(promise, f"{count:,}") for promise, count in found.broken.items()]
        print_table(("broken promise", "messages"), rows, ("messages",), empty=found.verdict)
        for sentence in silence(found):
            say(f"not known: {sentence}")
        for gap in found.gaps:
            between = f"{shown_time(gap.since_ms)} to {shown_time(gap.until_ms)}"
            many = f"{gap.events:,} events" if gap.events else "how many events"
            say(f"not known: {many} of {gap.broker}, {between}")
        if found.unknown:
            say(
                f"not known: {found.unknown:,} messages are not on the timeline; what ended them may be missing in the "
                "journal, or not be written yet"
            )
    return found.exit_code


def _tell_story(id: str, events: Sequence[Mapping[str, Any]]) -> None:
    say(f"{id}:")
    rows = [
        (
            _told_time(one["time"]),
            one["kind"].replace("_", " "),
            one["topic"],
            one["version"],
            _told_time(one["due"]),
            one["consumer"] or "",
            one["cause"] or "",
        )
        for one in events
    ]
    heads = ("time", "event", "topic", "version", "due", "consumer", "cause or reason")
    print_table(heads, rows, ("version",), empty="the journal has no event of it")
    say("")


def _told_time(at: datetime | None) -> str:
    """Spark gives times of this machine's zone without saying so."""
    return "" if at is None else shown_time(round(at.timestamp() * 1_000.0))


def _plain(value: Any) -> Any:
    """Values that JSON takes."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


@pipeline.command()
@click.argument("journal")
@click.option("--older", default="2h", show_default=True, type=DURATION, help="Only hours that began so long ago.")
@pipeline_command
def compact(journal: str, older: str, address: str, master: str, settings: tuple[str, ...], as_json: bool) -> int:
    """Make few large files of the journal's many small ones.

    \b
    Example:
      timeline pipeline compact file:///var/journal
    """
    older_ms = duration_ms(older, "--older")
    with running("compact", master, settings) as spark:
        from timeline.pipeline.jobs.journal import compact as run

        done = run(spark, journal, older_ms)
    _tell(dataclasses.asdict(done), as_json)
    return DONE


pipeline.add_command(year)
pipeline.add_command(measure)
