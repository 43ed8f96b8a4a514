"""What a doctor looks at, and what it says: one finding each for broker, clock, store, ports, topics and consumers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from timeline import __version__
from timeline.broker.server.process import check_free
from timeline.cli.options.client_options import who_serves
from timeline.cli.terminal.output import picked
from timeline.clock import CRITICAL_MS, WARN_MS, Clock
from timeline.config import ServeConfig
from timeline.driver.brokers import BrokerStanding, Standings
from timeline.driver.queries import PingAnswer
from timeline.model import TopicSettings
from timeline.storage_plugins import make_store, offload_of, shown
from timeline.storage_plugins.contract import StoreError, StoreRefused
from timeline.wire import Health
from timeline.wording import shown_lateness

STORE_SLOW_MS = 50.0
DISK_LOW_BYTES = 1024**3
DURABLE = "'timeline serve --store sqlite:///timeline.db' keeps them"


class Severity(IntEnum):
    """How good something is."""

    GOOD = 0
    WARNING = 1
    BAD = 2


GOOD, WARNING, BAD = Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice`: what to do, empty where nothing is. `nobody`: no broker is there."""

    about: str
    severity: Severity
    found: str
    advice: str = ""
    nobody: bool = False

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return picked(self, "about", "verdict=severity", "found", "advice")


def of_broker(one: BrokerStanding, ping: PingAnswer) -> list[Finding]:
    """A broker that answered: is it ready, of our version, near in time, and is its store quick?"""
    up = shown_lateness(max(0, one.now_ms - one.started_ms))
    who = f"{one.broker} at {one.address}, timeline {one.version}, up {up}, {ping.round_trip_ms:.1f} ms away"
    ours = __version__
    if one.trouble:
        found = [
            Finding("broker", BAD, f"{who}: not ready: {one.trouble}", "it tries again by itself; its log says more")
        ]
    elif one.version != ours:
        found = [Finding("broker", WARNING, f"{who}; this is {ours}", "bring both to one version when you can")]
    else:
        found = [Finding("broker", GOOD, who)]
    return [*found, _clock(ping), *_store_of(one)]


def _clock(ping: PingAnswer) -> Finding:
    offset_ms, error_ms = ping.offset_ms, ping.error_ms
    ahead = "ahead of" if offset_ms >= 0 else "behind"
    off, about = shown_lateness(abs(offset_ms)), shown_lateness(error_ms)
    said = f"the broker's is {off} {ahead} this machine's, give or take {about}"
    sure_ms = abs(offset_ms) - error_ms
    if sure_ms < WARN_MS:
        return Finding("clock", GOOD, said)
    verdict = BAD if sure_ms >= CRITICAL_MS else WARNING
    return Finding("clock", verdict, said, "set both clocks by chrony or ntpd: due times are read on the broker's")


def _store_of(one: BrokerStanding) -> list[Finding]:
    """How the store does, and a finding for each warning of the broker. Where those say why it is not used, or what is
    wrong with it, nothing else need be said."""
    weak = [Finding("store", WARNING, f"{one.store}: {warning}") for warning in one.warnings]
    asked = _store_at_work(one)
    return weak if weak and (one.trouble or asked.severity is GOOD) else [asked, *weak]


def _store_at_work(one: BrokerStanding) -> Finding:
    if one.trouble:
        return Finding("store", WARNING, f"{one.store or 'the store'}: not asked, the broker is not ready")
    took = f", leases take up to {shown_lateness(one.store_ms)}" if one.store_ms else ""
    if one.store_ms > STORE_SLOW_MS:
        advice = (
            "beyond lease ahead it is lateness: look at the disk or database (timeline_store_call_seconds in /metrics)"
        )
        return Finding("store", WARNING, f"{one.store}{took} (99 of 100)", advice)
    if one.store.startswith("memory://"):
        return Finding("store", WARNING, f"{one.store}{took}: messages end with the broker", DURABLE)
    return Finding("store", GOOD, f"{one.store}{took}")


async def of_ports(settings: ServeConfig, answered: bool) -> list[Finding]:
    """Whether the ports that serve would take here are free, or which broker has them. `answered`: a broker was asked
    already, so that one here is no surprise."""
    found, who = [], ""
    for option, address in (("--listen", settings.listen), ("--metrics", settings.metrics)):
        if address == "off":
            continue
        another = f"choose another: {option} HOST:PORT"
        try:
            check_free(address)
        except OSError as taken:
            if option == "--listen":
                who = await who_serves(address)
            if who:
                about = who if option == "--listen" else "it is taken, as is the port of --listen"
                verdict = GOOD if answered else WARNING
                found.append(Finding("port", verdict, f"{address} for {option}: {about}", "" if answered else another))
            else:
                why = (taken.strerror or str(taken)).lower()
                found.append(Finding("port", BAD, f"{address} for {option} cannot be had: {why}", another))
        else:
            found.append(Finding("port", GOOD, f"{address} for {option} is free"))
    return found


async def of_store(url: str) -> list[Finding]:
    """Whether the store at `url` could be served. One that is a file and not there is not made."""
    name = shown(url)
    try:
        store = make_store(url)
        if not store.capabilities.durable:
            return [Finding("store", WARNING, f"{name}: messages end with the broker", DURABLE)]
        file = file_of(url)
        if file is not None and not file.exists():
            return [_folder(name, file)]
        clock = Clock()
        begun_ms = clock.monotonic_ms()
        try:
            opened = await store.open()
            await store.check()
        finally:
            await store.close()
        took_ms = clock.monotonic_ms() - begun_ms
    except StoreError as refused:
        return [Finding("store", BAD, f"{name}: {refused.reason}", "'timeline serve' would meet the same")]
    found = [Finding("store", GOOD, f"{name}: {opened.server}, opened and checked in {shown_lateness(took_ms)}")]
    found += [Finding("store", WARNING, f"{name}: {warning}") for warning in opened.warnings]
    return [*found, *([] if file is None else _room(file))]


def file_of(url: str) -> Path | None:
    """The file that a store is; None for those that are none. Raises StoreRefused."""
    if not url.startswith("sqlite:"):
        return None
    from timeline.storage_plugins.sqlite.database import SqliteLocation

    return SqliteLocation.of(offload_of(url)[0]).path


def check_there(url: str, purpose: str) -> None:
    """Raises StoreRefused for a store that is a file which is not there: to open it would make it."""
    file = file_of(url)
    if file is not None and not file.exists():
        raise StoreRefused(f"{shown(url)}: there is no file {file}, so nothing to {purpose}")


def _folder(name: str, file: Path) -> Finding:
    folder = file.absolute().parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return Finding("store", GOOD, f"{name} is not there yet; serve will make it")
    why = "is not there" if not folder.is_dir() else "cannot be written by this user"
    return Finding("store", BAD, f"{name}: the folder {folder} {why}", f"mkdir -p {folder}, owned by who runs serve")


def _room(file: Path) -> list[Finding]:
    left = shutil.disk_usage(file.absolute().parent).free
    if left >= DISK_LOW_BYTES:
        return []
    found = f"{left // 1024**2:,} MiB left where {file.name} is"
    return [Finding("disk", WARNING, found, "make room: a full disk stops puts; nothing that was answered is lost")]


def of_topics(standings: Standings, settings: Mapping[str, TopicSettings]) -> list[Finding]:
    """What stands in the way of deliveries, topic by topic; and consumers that are not well."""
    found: list[Finding] = []
    due: dict[str, int] = {}
    consumers: dict[str, int] = {}
    credit: dict[str, int] = {}
    for one in standings.brokers:
        for load in one.topics:
            due[load.topic] = max(due.get(load.topic, 0), load.available)
            consumers[load.topic] = consumers.get(load.topic, 0) + load.consumers
            credit[load.topic] = credit.get(load.topic, 0) + load.credit
    for name, waiting in sorted(due.items()):
        paused = name in settings and settings[name].paused
        if paused:
            advice = f"'timeline topic resume {name}' lets it deliver"
            found.append(Finding("topic", WARNING, f"{name} is paused, {waiting:,} due", advice))
        elif waiting and not consumers[name]:
            advice = f"start one: 'timeline consume {name}' takes and prints them"
            found.append(Finding("consumers", WARNING, f"nobody consumes {name}, with {waiting:,} due", advice))
        elif waiting and not credit[name]:
            advice = "start more, give them more credit, or let handlers take less time"
            full = f"all consumers of {name} are full, with {waiting:,} due"
            found.append(Finding("consumers", WARNING, full, advice))
    for consumer in (consumer for one in standings.brokers for consumer in one.consumers):
        if consumer.health is not Health.HEALTHY:
            what, advice = UNWELL[consumer.health]
            found.append(Finding("consumers", WARNING, f"{consumer.id} of {consumer.topic} {what}", advice))
    summary = ", ".join(
        (
            _many(len(due), "topic"),
            f"{_many(sum(due.values()), 'message')} due",
            _many(sum(consumers.values()), "consumer"),
        )
    )
    return [Finding("topics", GOOD, summary), *found]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


UNWELL = {
    Health.SILENT: ("was not heard of lately", "its process or its network hangs: it gets nothing until it is heard"),
    Health.STALLED: ("does not take what is pushed", "its process is too busy to read: give it less credit"),
    Health.SET_ASIDE: (
        "let its leases run out one after another and is set aside for a while",
        "its handler hangs, or the lease is too short for it",
    ),
}
"""What is wrong with a consumer, and what to do."""
