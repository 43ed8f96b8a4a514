"""`timeline copy`: topics with their payloads from one store into another."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from timeline.cli.app import DONE, REFUSED, SOME_FAILED, UNREACHABLE, Failed, awaited, complain, explain, say
from timeline.cli.look.findings import check_there
from timeline.cli.options.values import Url, shown_bytes, shown_count
from timeline.cli.terminal.output import picked, print_fields, print_json, print_table
from timeline.cli.terminal.progress import Progress
from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.model import Topic
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.contract import Store, StoreError, StoreRefused, TopicConflict
from timeline.storage_plugins.copying import Compared, Copied, TopicCopy, topic_of

SHOWN = 20


@click.command()
@click.argument("source", metavar="SRC", type=Url())
@click.argument("target", metavar="DST", type=Url())
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="The topic to copy; may be repeated.")
@click.option("--leased", is_flag=True, help="Also what is leased, as due at the end of its lease.")
@click.option("--live", is_flag=True, help="Also a topic that is not paused, when no broker serves it.")
@click.option("--no-verify", is_flag=True, help="Do not walk both stores again to compare them.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each topic.")
def copy(source: str, target: str, topics: tuple[str, ...], no_verify: bool, as_json: bool, **given: bool) -> int:
    """Copy topics, payloads and dead letters included, from the store at SRC into the one at DST.

    Nobody may write to the source meanwhile: pause the topic, wait until nothing is leased, stop the brokers. The topic
    in DST is paused until both sides have been compared and are the same; then it is as live as the source's. A copy
    that broke off goes on where it was when it is run again, and passes over topics that are there already. Exit code 1
    when something could not be copied or differs, 4 when a topic was refused; the others are copied all the same.

    \b
    Example:
      timeline copy sqlite:///timeline.db redis://localhost:6379/0 --topic departures
      timeline copy sqlite:///old.db 'sqlite:///new.db?payloads=file:///srv/payloads' --topic a --topic b
    """
    if not topics:
        raise Invalid("name what to copy: --topic NAME, once for each")
    return awaited(_copy_all(source, target, topics, not no_verify, as_json, **given))


async def _copy_all(
    source_url: str, target_url: str, names: tuple[str, ...], verify: bool, as_json: bool, **given: bool
) -> int:
    source, target = make_store(source_url), make_store(target_url)
    check_there(source_url, "copy")
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
    """Opens the store; its cluster's uid. An error says which of the two it is about."""
    try:
        return (await store.open()).cluster_uid
    except StoreError as error:
        raise type(error)(f"{shown(url)}: {error.reason}") from error


async def _copy_one(copying: TopicCopy, verify: bool, as_json: bool) -> int:
    topic = copying.topic
    with Progress(f"counted of {topic.name}") as counting:
        await copying.prepare(counting.add)
    if copying.whole is not None:
        there = copying.whole.target.messages  # its copy was finished before
        if as_json:
            print_json(_as_json(topic, Copied(there=there), copying.whole, 0.0, True, {}))
        else:
            say(f"{topic.name} is there already, whole: {there:,} messages, compared and the same")
        return DONE
    try:
        with Progress(f"copied of {topic.name}", copying.total) as progress:
            done = await copying.run(progress.add)
        rate_per_s = progress.rate_per_s
        compared: Compared | None = None
        if verify:
            with Progress(f"compared of {topic.name}", done.copied + done.there) as comparing:
                compared = await copying.compare(comparing.add)
    except StoreError as error:
        raise Failed(
            UNREACHABLE if error.retryable else REFUSED,
            f"{error.reason}. {copying.done.copied:,} messages were copied; the same command goes on from there",
        ) from error
    well = not done.failed and (compared is None or compared.same)
    if well:
        await copying.finish()
    _tell(topic, done, compared, rate_per_s, well, as_json)
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
        "failed": f"{done.failed:,}",
    }
    if compared is not None:
        for side, told in (("source", compared.source), ("target", compared.target)):
            fields[side] = f"{told.messages:,} messages, {shown_bytes(told.payload_bytes)}, {told.checksum}"
        fields["differing"] = f"{compared.differing:,}"
    if not well:
        fields["the target"] = "stays paused: mend what is told below, and run it again"
    print_fields(fields)
    if reasons:
        rows = [(id.decode(errors="replace"), why) for id, why in list(reasons.items())[:SHOWN]]
        print_table(("id", "why"), rows, empty="")


def _as_json(
    topic: Topic, done: Copied, compared: Compared | None, rate_per_s: float, well: bool, reasons: dict[bytes, str]
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "topic": topic.name,
        "ok": well,
        **picked(done, "copied", "there", "dead", "expired"),
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
