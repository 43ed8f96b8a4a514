"""`timeline cluster`: brokers, their consumers, buckets, clocks and lateness on one screen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import timeline
from timeline.cli.look.top import (
    LATE,
    broker_json,
    consumer_table,
    late_bound,
    lateness_json,
    more,
    store_warnings,
    watch_live,
)
from timeline.cli.options import ClientOptions, client_command, connected, every_option
from timeline.cli.output import QUIET, console, picked, print_json, table
from timeline.clock import CRITICAL_MS, WARN_MS
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings
from timeline.driver.queries import PingAnswer
from timeline.driver.times import iso_or_none
from timeline.driver.transport.channel import named_trouble
from timeline.errors import TimelineError
from timeline.watcher import bounds_ms
from timeline.wording import shown_lateness

CONSUMERS_SHOWN, TOPICS_SHOWN = 12, 50
WIDTH_UNSEEN = 160
DEALT_SAID = "By topic and broker: buckets that the broker dispatches, for its number of connected consumers"


@dataclass(frozen=True, slots=True)
class BrokerLine:
    """One broker. `clock_ms`: how far its clock is ahead of the median clock, give or take `clock_error_ms`; None when
    it did not answer that. `lateness`: of all topics since it started; None without deliveries."""

    stands: BrokerStanding
    clock_ms: float | None
    clock_error_ms: float
    lateness: LatenessHistogram | None

    def total(self, name: str) -> int:
        """Return the sum of a figure, such as `credit`, over the broker's topics."""
        return sum(getattr(load, name) for load in self.stands.topics)

    def as_json(self) -> dict[str, Any]:
        """Return the broker for machines."""
        return {
            **broker_json(self.stands),
            "sync": self.stands.sync or None,
            "clock_ms": None if self.clock_ms is None else round(self.clock_ms, 3),
            "clock_error_ms": round(self.clock_error_ms, 3),
            **{name: self.total(name) for name in ("consumers", "in_flight", "credit")},
            "lateness_ms": lateness_json(bounds_ms(self.lateness)),
        }


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """The cluster at one moment."""

    now_ms: int
    brokers: tuple[BrokerLine, ...]
    unreachable: dict[str, str]

    @property
    def topics(self) -> dict[str, int]:
        """Topics and how many buckets each has."""
        loads = (load for one in self.brokers for load in one.stands.topics)
        return dict(sorted((load.topic, load.buckets) for load in loads))

    @property
    def dealt(self) -> dict[str, dict[str, tuple[int, int]]]:
        """By topic and broker's name: how many buckets it dispatches, and how many consumers it has."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for one in self.brokers:
            for load in one.stands.topics:
                mine = (load.dealt if load.consumers else 0, load.consumers)
                found.setdefault(load.topic, {})[one.stands.broker] = mine
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the cluster for machines."""
        assignment, all_dealt = [], self.dealt
        for topic, buckets in self.topics.items():
            dealt = {
                name: {"buckets": dealt, "consumers": consumers}
                for name, (dealt, consumers) in all_dealt[topic].items()
            }
            assignment.append({"topic": topic, "buckets": buckets, "brokers": dealt})
        return {
            "now": iso_or_none(self.now_ms),
            "brokers": [one.as_json() for one in self.brokers],
            "unreachable": self.unreachable,
            "assignment": assignment,
            "consumers": [
                {"id": one.id, "topic": one.topic, "broker": broker, **picked(one, "health", "in_flight", "credit")}
                for broker, one in self.consumers
            ],
        }

    @property
    def consumers(self) -> list[tuple[str, ConsumerStatus]]:
        """All connected consumers, each with its broker's name."""
        return [(one.stands.broker, consumer) for one in self.brokers for consumer in one.stands.consumers]


@click.command()
@click.option("--watch", is_flag=True, help="Look again and again, until the key q.")
@every_option("With --watch: time between two looks.")
@client_command
async def cluster(tl: timeline.Timeline, options: ClientOptions, watch: bool, every: int) -> None:
    """Show the cluster: each broker with its clock, load and lateness, the buckets of each topic that it dispatches,
    and its consumers.

    It asks every broker that --address knows. CLOCK is the difference to the median of all brokers' clocks. Lateness
    is of all deliveries since the broker started, as bounds that were kept. At most 50 topics are shown, those with
    most consumers first; --json has all.

    \b
    Example:
      timeline cluster
      timeline cluster --watch
      timeline cluster --json
    """
    screen = console()
    width = screen.width if screen.is_terminal else WIDTH_UNSEEN
    if watch and not options.as_json and screen.is_terminal:
        return await watch_live(
            screen,
            every / 1000,
            lambda: look_at(tl, options.timeout),
            lambda seen, gone: picture(seen, gone, screen.width),
        )
    while True:
        look = await look_at(tl, options.timeout)
        if options.as_json:
            print_json(look.as_json())
        else:
            screen.print(picture(look, width=width), width=width)
        if not watch:
            return
        await asyncio.sleep(every / 1000)


async def look_at(tl: timeline.Timeline, timeout: str) -> ClusterLook:
    """Return the cluster as it is now. Raises TimelineError when no broker answers."""
    standings = await tl.standing()
    pings = await asyncio.gather(*(_ping(one.address, timeout) for one in standings.brokers))
    return put_together(standings, pings)


async def _ping(address: str, timeout: str) -> PingAnswer | None:
    """Return what the broker at `address` says of its clock. None when it does not answer."""
    try:
        async with connected(address, timeout) as tl:
            return await tl.ping()
    except TimelineError:
        return None


def put_together(standings: Standings, pings: Sequence[PingAnswer | None]) -> ClusterLook:
    """Return one look, made of all answers. `pings`: one for each broker."""
    offsets_ms = [ping.offset_ms for ping in pings if ping is not None]
    median_ms = median(offsets_ms) if offsets_ms else 0.0
    brokers = [
        BrokerLine(
            stands=one,
            clock_ms=None if ping is None else ping.offset_ms - median_ms,
            clock_error_ms=0.0 if ping is None else ping.error_ms,
            lateness=_lateness(one),
        )
        for one, ping in zip(standings.brokers, pings, strict=True)
    ]
    brokers.sort(key=lambda one: one.stands.broker)
    now_ms = max(one.now_ms for one in standings.brokers)
    return ClusterLook(now_ms, tuple(brokers), dict(standings.unreachable))


def _lateness(stands: BrokerStanding) -> LatenessHistogram | None:
    whole: LatenessHistogram | None = None
    for late in stands.lateness.values():
        whole = late if whole is None else whole.plus(late)
    return whole


def picture(look: ClusterLook, trouble: str = "", width: int = WIDTH_UNSEEN) -> Group:
    """Draw the look with lines of `width`. `trouble`: why it is not of this moment."""
    head = Text.assemble(("timeline cluster", "bold"), f"  {iso_or_none(look.now_ms)}")
    if trouble:
        head.append(f"   {trouble}", "bold red")
    parts: list[RenderableType] = [head, Text(""), _brokers(look, width)]
    for one in look.brokers:
        if one.stands.trouble:
            parts.append(Text(f"  ● {one.stands.broker}: {one.stands.trouble}", "bold red"))
    parts += store_warnings([one.stands for one in look.brokers])
    parts += [Text(f"  ✗ {named_trouble(address, why)}", "bold red") for address, why in look.unreachable.items()]
    parts += [Text(""), Text(DEALT_SAID, QUIET), _assignment(look, width)]
    parts += [*more(len(look.topics) - TOPICS_SHOWN, "topic"), Text("")]
    consumers = look.consumers
    shown = [one for _, one in consumers[:CONSUMERS_SHOWN]]
    parts.append(consumer_table(shown, width, [name for name, _ in consumers]))
    parts += more(len(consumers) - CONSUMERS_SHOWN, "consumer")
    return Group(*parts)


def _brokers(look: ClusterLook, width: int) -> Table:
    numbers = ("UP", "CLOCK", "CONSUMERS", "IN FLIGHT", "CREDIT", *LATE)
    rows = [
        (
            Text(one.stands.broker, "bold red" if one.stands.trouble else "bold"),
            one.stands.address,
            one.stands.version,
            shown_lateness(max(0, one.stands.now_ms - one.stands.started_ms)),
            _clock(one),
            *(f"{one.total(name):,}" for name in ("consumers", "in_flight", "credit")),
            *map(late_bound, bounds_ms(one.lateness)),
            Text(one.stands.sync, QUIET),
        )
        for one in look.brokers
    ]
    spare = ("CLUSTER", "VERSION", "CREDIT", "p50 LATE", "IN FLIGHT", "UP", "MAX LATE")
    return table(("BROKER", "ADDRESS", "VERSION", *numbers, "CLUSTER"), rows, width, numbers, spare=spare)


def _clock(one: BrokerLine) -> Text:
    if one.clock_ms is None:
        return Text("?", "bold red")
    sure_ms = abs(one.clock_ms) - one.clock_error_ms
    style = "bold red" if sure_ms >= CRITICAL_MS else "bold yellow" if sure_ms >= WARN_MS else ""
    return Text(f"{one.clock_ms:+.1f} ± {one.clock_error_ms:.1f} ms", style)


def _assignment(look: ClusterLook, width: int) -> Table:
    """Draw a line per topic: how many of its buckets each broker dispatches, and for how many consumers."""
    names = [one.stands.broker for one in look.brokers]
    rows, all_dealt = [], look.dealt
    # Topics with most consumers first: those without any say the least.
    shown = sorted(look.topics.items(), key=lambda row: (-_consumers_of(all_dealt[row[0]]), row[0]))[:TOPICS_SHOWN]
    for topic, buckets in shown:
        dealt = [all_dealt[topic].get(name, (0, 0)) for name in names]
        cells = (Text(f"{mine:,} for {consumers:,}", "" if consumers else QUIET) for mine, consumers in dealt)
        rows.append((Text(topic, "bold"), f"{buckets:,}", *cells))
    numbers = ("BUCKETS", *(f"on {name}" for name in names))
    return table(("TOPIC", *numbers), rows, width, numbers, empty="no topics yet", spare=("BUCKETS",))


def _consumers_of(dealt: dict[str, tuple[int, int]]) -> int:
    return sum(consumers for _, consumers in dealt.values())
