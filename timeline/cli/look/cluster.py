"""`timeline cluster`: brokers, who is connected to them, who deals what, clocks and lateness on one screen."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

import timeline
from timeline.cli.look.snapshot import bound_ms
from timeline.cli.look.top_view import LATE, QUIET, consumer_table, late_bound, more, store_warnings, table, watch_live
from timeline.cli.options.client_options import ClientOptions, client_command, connected
from timeline.cli.options.values import every_option, iso
from timeline.cli.terminal.output import console, picked, print_json
from timeline.clock import CRITICAL_MS, WARN_MS
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings
from timeline.driver.queries import PingAnswer
from timeline.errors import TimelineError
from timeline.wording import shown_lateness

CONSUMERS_SHOWN = 12
WIDTH_UNSEEN = 160
DEALT_SAID = "Of each topic, by broker: the buckets that it deals, for so many consumers that are connected to it"


@dataclass(frozen=True, slots=True)
class BrokerLine:
    """One broker. `clock_ms`: how far it is ahead of the middle of all brokers' clocks, give or take `clock_error_ms`;
    None when it did not answer that. `lateness`: of all topics, since it started; None without deliveries."""

    stands: BrokerStanding
    clock_ms: float | None
    clock_error_ms: float
    lateness: LatenessHistogram | None


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

    def dealt(self, topic: str) -> dict[str, tuple[int, int]]:
        """By broker's name: how many buckets of the topic it deals, and how many consumers it has."""
        return {
            one.stands.broker: (load.dealt if load.consumers else 0, load.consumers)
            for one in self.brokers
            for load in one.stands.topics
            if load.topic == topic
        }

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "now": iso(self.now_ms),
            "brokers": [_broker_json(one) for one in self.brokers],
            "unreachable": self.unreachable,
            "assignment": [
                {
                    "topic": topic,
                    "buckets": buckets,
                    "brokers": {
                        name: {"buckets": dealt, "consumers": consumers}
                        for name, (dealt, consumers) in self.dealt(topic).items()
                    },
                }
                for topic, buckets in self.topics.items()
            ],
            "consumers": [
                {"id": one.id, "topic": one.topic, "broker": broker, **picked(one, "health", "in_flight", "credit")}
                for broker, one in self.consumers
            ],
        }  # fmt: skip

    @property
    def consumers(self) -> list[tuple[str, ConsumerStatus]]:
        """All that are connected, each with its broker's name."""
        return [(one.stands.broker, consumer) for one in self.brokers for consumer in one.stands.consumers]


def _broker_json(one: BrokerLine) -> dict[str, Any]:
    stands, late = one.stands, one.lateness
    bounds = {name: bound_ms(late, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {
        **picked(stands, "broker", "address", "version"),
        "up_ms": stands.now_ms - stands.started_ms,
        **picked(stands, "trouble", "sync", "store"),
        "store_ms": stands.store_ms or None,
        "store_warnings": list(stands.warnings),
        "clock_ms": None if one.clock_ms is None else round(one.clock_ms, 3),
        "clock_error_ms": round(one.clock_error_ms, 3),
        "consumers": sum(load.consumers for load in stands.topics),
        "in_flight": sum(load.in_flight for load in stands.topics),
        "credit": sum(load.credit for load in stands.topics),
        "lateness_ms": {name: None if bound is None or math.isinf(bound) else bound for name, bound in bounds.items()},
    }  # fmt: skip


@click.command()
@click.option("--watch", is_flag=True, help="Look again and again, until the key q.")
@every_option("How often, with --watch.")
@client_command
async def cluster(tl: timeline.Timeline, options: ClientOptions, watch: bool, every: int) -> None:
    """Show the cluster: each broker with its clock, load and lateness, which buckets of each topic it deals, and who is
    connected to it.

    All brokers are asked that those at --address know of. CLOCK is how far a broker's clock is from the middle of all
    of them; percentiles of lateness are of all deliveries since the broker started, as bounds that were kept.

    \b
    Example:
      timeline cluster
      timeline cluster --watch
      timeline cluster --json
    """
    screen = console()
    if watch and not options.as_json and screen.is_terminal:
        return await watch_live(screen, every / 1000, lambda: look_at(tl, options.timeout), picture)
    while True:
        look = await look_at(tl, options.timeout)
        if options.as_json:
            print_json(look.as_json())
        else:
            screen.print(picture(look), width=screen.width if screen.is_terminal else WIDTH_UNSEEN)
        if not watch:
            return
        await asyncio.sleep(every / 1000)


async def look_at(tl: timeline.Timeline, timeout: str) -> ClusterLook:
    """The cluster now. Raises TimelineError when no broker answers."""
    standings = await tl.standing()
    pings = await asyncio.gather(*(_ping(one.address, timeout) for one in standings.brokers))
    return put_together(standings, pings)


async def _ping(address: str, timeout: str) -> PingAnswer | None:
    """What the clock of the broker at `address` says; None when it has gone."""
    try:
        async with connected(address, timeout) as tl:
            return await tl.ping()
    except TimelineError:
        return None


def put_together(standings: Standings, pings: Sequence[PingAnswer | None]) -> ClusterLook:
    """One look, of all that brokers answered; `pings`: one for each."""
    offsets_ms = [ping.offset_ms for ping in pings if ping is not None]
    middle_ms = median(offsets_ms) if offsets_ms else 0.0
    brokers = [
        BrokerLine(
            stands=one,
            clock_ms=None if ping is None else ping.offset_ms - middle_ms,
            clock_error_ms=0.0 if ping is None else ping.error_ms,
            lateness=_lateness(one),
        )
        for one, ping in zip(standings.brokers, pings, strict=True)
    ]
    brokers.sort(key=lambda one: one.stands.broker)
    now_ms = max(one.now_ms for one in standings.brokers)
    return ClusterLook(now_ms, tuple(brokers), dict(standings.unreachable))


def _lateness(stands: BrokerStanding) -> LatenessHistogram | None:
    """Of all the broker's topics together."""
    whole: LatenessHistogram | None = None
    for late in stands.lateness.values():
        whole = late if whole is None else whole.plus(late)
    return whole


def picture(look: ClusterLook, trouble: str = "") -> Group:
    """The look, for a terminal. `trouble`: why it is not of this moment."""
    head = Text.assemble(("timeline cluster", "bold"), f"  {iso(look.now_ms)}")
    if trouble:
        head.append(f"   {trouble}", "bold red")
    parts: list[RenderableType] = [head, Text(""), _brokers(look)]
    for one in look.brokers:
        if one.stands.trouble:
            parts.append(Text(f"  ● {one.stands.broker}: {one.stands.trouble}", "bold red"))
    parts += store_warnings([one.stands for one in look.brokers])
    parts += [Text(f"  ✗ {address}: {why}", "bold red") for address, why in look.unreachable.items()]
    parts += [Text(""), Text(DEALT_SAID, QUIET), _assignment(look), Text("")]
    consumers = look.consumers
    parts.append(consumer_table([one for _, one in consumers[:CONSUMERS_SHOWN]], [name for name, _ in consumers]))
    parts += more(len(consumers) - CONSUMERS_SHOWN, "consumer")
    return Group(*parts)


def _brokers(look: ClusterLook) -> RenderableType:
    numbers = ("UP", "CLOCK", "CONSUMERS", "IN HAND", "CREDIT", *LATE)
    made = table("BROKER", "ADDRESS", "VERSION", *numbers, "CLUSTER", right=numbers)
    for one in look.brokers:
        stands = one.stands
        made.add_row(
            Text(stands.broker, "bold red" if stands.trouble else "bold"),
            stands.address,
            stands.version,
            shown_lateness(max(0, stands.now_ms - stands.started_ms)),
            _clock(one),
            f"{sum(load.consumers for load in stands.topics):,}",
            f"{sum(load.in_flight for load in stands.topics):,}",
            f"{sum(load.credit for load in stands.topics):,}",
            *(late_bound(bound_ms(one.lateness, share)) for share in (0.5, 0.99, 1.0)),
            Text(stands.sync, QUIET),
        )
    return made


def _clock(one: BrokerLine) -> Text:
    if one.clock_ms is None:
        return Text("?", "bold red")
    sure_ms = abs(one.clock_ms) - one.clock_error_ms
    style = "bold red" if sure_ms >= CRITICAL_MS else "bold yellow" if sure_ms >= WARN_MS else ""
    return Text(f"{one.clock_ms:+.1f} ± {one.clock_error_ms:.1f} ms", style)


def _assignment(look: ClusterLook) -> RenderableType:
    """A line a topic: how many of its buckets each broker deals, and for how many consumers."""
    names = [one.stands.broker for one in look.brokers]
    made = table("TOPIC", "BUCKETS", *(f"on {name}" for name in names), right=("BUCKETS", *(f"on {x}" for x in names)))
    for topic, buckets in look.topics.items():
        dealt = look.dealt(topic)
        cells = []
        for name in names:
            mine, consumers = dealt.get(name, (0, 0))
            cells.append(Text(f"{mine:,} for {consumers:,}", "" if consumers else QUIET))
        made.add_row(Text(topic, "bold"), f"{buckets:,}", *cells)
    if not look.topics:
        made.add_row(Text("no topics yet", QUIET))
    return made
