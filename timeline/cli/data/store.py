"""`timeline store` and `timeline copy`: a store's schema, and topics from one store into another."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from timeline.cli.app import (
    DONE,
    REFUSED,
    SOME_FAILED,
    Failed,
    Suggesting,
    awaited,
    complain,
    exit_code_of,
    say,
)
from timeline.cli.options import Url, json_option, shown_bytes, shown_count, yes_option
from timeline.cli.output import Progress, confirm, id_cell, picked, print_fields, print_json, print_table
from timeline.clock import Clock
from timeline.errors import Invalid, explain
from timeline.model import Topic
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.contract import Store, StoreError, StoreRefused, TopicConflict
from timeline.storage_plugins.copying import Compared, Copied, TopicCopy, topic_of
from timeline.storage_plugins.versions import Versions

SHOWN = 20
"""Messages that could not be copied, as many as are named."""


@click.group(cls=Suggesting)
def store() -> None:
    """Bring a store's schema to this version.

    \b
    Example:
      timeline store migrate sqlite:///timeline.db
    """


@store.command()
@click.argument("url", type=Url())
@click.option("--contract", is_flag=True, help="Remove what only brokers of the previous version need.")
@yes_option
@json_option
def migrate(url: str, contract: bool, yes: bool, as_json: bool) -> int:
    """Bring the schema of the store at URL to this Timeline's version.

    The first broker of a new version does that by itself: it adds what it needs, and brokers of the previous version
    go on beside it. When none of them is left, --contract removes what only they needed. From then on they are refused,
    and one that still runs fails. A store does not know its brokers, so you are asked.

    \b
    Example:
      timeline store migrate sqlite:///timeline.db
      timeline store migrate sqlite:///timeline.db --contract --yes
    """
    found: list[Versions | None] = []

    async def work(contract: bool) -> None:
        opened = make_store(url)
        check_there(opened, url, "migrate")
        try:
            await opened.open()
            found.append(await opened.migrate(contract))
        finally:
            await opened.close()

    awaited(work(contract=False))
    reached = found[-1]
    if contract and reached is not None and reached.oldest < reached.version:
        if not yes:
            confirm(f"Brokers of schema version {reached.oldest} fail from now on. Has the last of them ended?")
        awaited(work(contract=True))
        reached = found[-1]
    if as_json:
        versions = {"version": reached and reached.version, "oldest": reached and reached.oldest}
        print_json({"url": shown(url), **versions})
    elif reached is None:
        say(f"{shown(url)} has no schema to migrate")
    else:
        shares = f"brokers of {reached.oldest} may share it" if reached.oldest < reached.version else "contracted"
        print_fields({"store": shown(url), "schema version": f"{reached.version}, {shares}"})
    return DONE


def check_there(store: Store, url: str, purpose: str) -> None:
    """Raise StoreRefused when the file of a store is missing: to open it would create it."""
    if store.file is not None and not store.file.exists():
        raise StoreRefused(f"{shown(url)}: there is no file {store.file}, so nothing to {purpose}")


@click.command()
@click.argument("source", metavar="SRC", type=Url())
@click.argument("target", metavar="DST", type=Url())
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="Topic to copy; repeatable.")
@click.option("--leased", is_flag=True, help="Copy leased messages, too, as due at the end of their lease.")
@click.option("--live", is_flag=True, help="Copy a topic that is not paused. No broker may serve it.")
@click.option("--no-verify", is_flag=True, help="Do not scan both stores to compare them.")
@json_option
def copy(source: str, target: str, topics: tuple[str, ...], no_verify: bool, as_json: bool, **given: bool) -> int:
    """Copy topics, messages and recurring schedules, from the store at SRC into the one at DST.

    Stop all writers to the source first: pause the topic, wait until nothing is leased, stop the brokers. The topic
    in DST is paused until both sides are compared and equal. Then it delivers if the source's does. A copy that broke
    off continues when it is run again, and skips topics that are complete.

    Exit code 1 when something could not be copied or differs, 4 when a topic was refused. The others are still copied.

    \b
    Example:
      timeline copy sqlite:///timeline.db redis://localhost:6379/0 --topic trips
      timeline copy sqlite:///old.db \\
        'sqlite:///new.db?payloads=file:///srv/payloads' --topic a --topic b
    """
    if not topics:
        raise Invalid("name what to copy: --topic NAME, once for each")
    return awaited(_copy_all(source, target, topics, not no_verify, as_json, **given))


async def _copy_all(
    source_url: str, target_url: str, names: tuple[str, ...], verify: bool, as_json: bool, **given: bool
) -> int:
    source, target = make_store(source_url), make_store(target_url)
    check_there(source, source_url, "copy")
    try:
        ours = await _opened(source, source_url)
        if ours == await _opened(target, target_url):
            raise StoreRefused(f"{shown(source_url)} and {shown(target_url)} are one and the same store")
        topics = [await topic_of(source, name) for name in dict.fromkeys(names)]
        codes = []
        for topic in topics:
            copying = TopicCopy(source, target, topic, Clock().now_ms, **given)
            try:
                codes.append(await _copy_one(copying, verify, as_json))
            except (StoreRefused, TopicConflict) as refused:
                if len(topics) == 1:
                    raise
                complain(explain(refused))
                codes.append(REFUSED)
    finally:
        await source.close()
        await target.close()
    return max(codes)


async def _opened(store: Store, url: str) -> str:
    """Open the store and return its cluster's uid. An error names the store."""
    try:
        return (await store.open()).cluster_uid
    except StoreError as error:
        raise type(error)(f"{shown(url)}: {error.reason}") from error


async def _copy_one(copying: TopicCopy, verify: bool, as_json: bool) -> int:
    topic = copying.topic
    with Progress(f"counted of {topic.name}") as counting:
        await copying.prepare(counting.add)
    if copying.whole is not None:
        return await _tell_whole(copying, copying.whole, as_json)
    try:
        with Progress(f"copied of {topic.name}", copying.total) as progress:
            done = await copying.run(progress.add)
        rate_per_s = progress.rate_per_s
        compared: Compared | None = None
        if verify:
            with Progress(f"compared of {topic.name}", done.copied + done.there) as comparing:
                compared = await copying.compare(comparing.add)
        if not done.failed and (compared is None or compared.same):
            await copying.copy_schedules()
    except StoreError as error:
        raise Failed(
            exit_code_of(error),
            f"{error.reason}. {copying.done.copied:,} messages were copied; the same command goes on from there",
        ) from error
    well = not done.failed and (compared is None or compared.same)
    if well:
        await copying.finish()
    _tell(topic, done, compared, rate_per_s, well, as_json)
    return DONE if well else SOME_FAILED


async def _tell_whole(copying: TopicCopy, compared: Compared, as_json: bool) -> int:
    """Copy the schedules of a topic whose messages an earlier run has copied, and print both."""
    topic, done = copying.topic, copying.done
    await copying.copy_schedules()
    done.there = compared.target.messages
    well = not done.failed
    if as_json:
        print_json(_as_json(topic, done, compared, 0.0, well, done.reasons))
    else:
        say(f"{topic.name} is there already, whole: {done.there:,} messages, compared and the same")
        for id, why in done.reasons.items():
            say(f"{id.decode()}: {why}")
    return DONE if well else SOME_FAILED


def _tell(topic: Topic, done: Copied, compared: Compared | None, rate_per_s: float, well: bool, as_json: bool) -> None:
    reasons = {**(compared.reasons if compared else {}), **done.reasons}
    if as_json:
        print_json(_as_json(topic, done, compared, rate_per_s, well, reasons))
        return
    fields: dict[str, object] = {
        "topic": topic.name,
        "copied": shown_count(done.copied, rate_per_s),
        "there already": f"{done.there:,}",
        "dead letters": f"{done.dead:,} of these",
        "expired": f"{done.expired:,}, left behind",
        "schedules": f"{done.schedules:,}",
        "failed": f"{done.failed:,}",
    }
    if compared is not None:
        for side, told in (("source", compared.source), ("target", compared.target)):
            fields[side] = f"{told.messages:,} messages, {shown_bytes(told.payload_bytes)}, {told.checksum}"
        fields["differing"] = f"{compared.differing:,}"
    if not well:
        fields["the target"] = "stays paused: fix what is named below, and run it again"
    print_fields(fields)
    if reasons:
        rows = [(id_cell(id.decode(errors="replace")), why) for id, why in list(reasons.items())[:SHOWN]]
        print_table(("id", "why"), rows, empty="")


def _as_json(
    topic: Topic, done: Copied, compared: Compared | None, rate_per_s: float, well: bool, reasons: dict[bytes, str]
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "topic": topic.name,
        "ok": well,
        **picked(done, "copied", "there", "dead", "expired", "schedules"),
        "rate_per_s": round(rate_per_s),
        "failed": done.failed,
        "reasons": {id.decode(errors="replace"): why for id, why in reasons.items()},
    }
    if compared is not None:
        told |= {
            "source": dataclasses.asdict(compared.source),
            "target": dataclasses.asdict(compared.target),
            "differing": compared.differing,
        }
    return told
