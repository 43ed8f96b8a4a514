"""The job `forecast`: how many messages come due per step ahead, within what band, and how many consumers they need.

The forecast adds two parts. The pending messages on the timeline are known. The messages still to be put are learnt
from the journal. For each week before, it counts the messages due at that hour of that weekday. Only those count that
were put less long ahead than the step is away now. Each week is one observation. The band reaches from the least to the
most of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.errors import Invalid
from timeline.pipeline.jobs.journal import is_kind, journal
from timeline.pipeline.jobs.page import bars, lines, page, paragraph, section, table, tiles
from timeline.pipeline.session import Progress, quiet, read_topic

MAX_STEPS = 10_000
HOUR_MS, WEEK_MS = 3_600_000, 7 * 86_400_000
MINUTE_MS = 60_000
SPIKES = 10
ABOVE = 1.5


@dataclass
class LoadStep:
    """A step ahead: messages `pending` now, and `expected` in all, between `low` and `high`. `peak_per_s`: pending
    messages of its busiest second."""

    start_ms: int
    pending: int = 0
    expected: float = 0.0
    low: float = 0.0
    high: float = 0.0
    peak_per_s: int = 0


@dataclass
class LoadForecast:
    """`steps` of `step_ms` each, and the messages that are `overdue` now. `weeks`: of history. `per_consumer_s`:
    messages that one consumer settles per second, `measured` in the journal or given; 0: not known."""

    topic: str
    now_ms: int
    step_ms: int
    steps: list[LoadStep] = field(default_factory=list)
    overdue: int = 0
    weeks: int = 0
    per_consumer_s: float = 0.0
    measured: bool = False

    @property
    def consumers(self) -> int:
        """The consumers that the busiest step needs, at the upper end of its band; 0: not known."""
        busiest = max((step.high for step in self.steps), default=0.0) / (self.step_ms / 1000)
        return max(1, ceil(busiest / self.per_consumer_s)) if self.per_consumer_s else 0

    @property
    def spikes(self) -> list[LoadStep]:
        """The fullest steps, with at least twice the mean. If many have that, as on a plateau, only those well above
        them."""
        most = sorted(self.steps, key=lambda step: -step.expected)
        usual = sum(step.expected for step in self.steps) / max(1, len(self.steps))
        high = [step for step in most if step.expected and step.expected >= 2 * usual]
        if len(high) > SPIKES:
            high = [step for step in high if step.expected >= ABOVE * high[len(high) // 2].expected]
        return high[:SPIKES]


def forecast(
    spark: SparkSession,
    addresses: str,
    topic: str,
    window_ms: int = WEEK_MS,
    step_ms: int = HOUR_MS,
    history: str = "",
    per_consumer_s: float = 0.0,
    progress: Progress = quiet,
) -> LoadForecast:
    """Forecast the load of `topic` over the next `window_ms`. `history`: the journal's URL; empty: count only pending
    messages. `per_consumer_s`: messages that a consumer settles per second; 0: as in the journal. Raise Invalid or
    NotFound."""
    count = -(-window_ms // step_ms)
    if not 1 <= count <= MAX_STEPS:
        raise Invalid(f"{count} steps are asked for, 1 to {MAX_STEPS} can be drawn. Choose another --window or --step")
    now_ms = Clock().now_ms()
    start_ms = now_ms - now_ms % step_ms
    ahead = LoadForecast(topic, now_ms, step_ms, [LoadStep(start_ms + at * step_ms) for at in range(count)])
    progress("reading what is pending", 0, 3)
    _pending(spark, addresses, topic, ahead)
    if history:
        progress("reading the history", 1, 3)
        events = journal(spark, history).where(F.col("topic") == topic)
        _learn(spark, events, ahead)
        if not per_consumer_s:
            per_consumer_s = _settled_per_s(events)
            ahead.measured = per_consumer_s > 0
    ahead.per_consumer_s = per_consumer_s
    progress("done", 3, 3)
    return ahead


def _pending(spark: SparkSession, addresses: str, topic: str, ahead: LoadForecast) -> None:
    rows = read_topic(spark, addresses, topic, "due timestamp", state="waiting,available")
    due_ms = F.unix_millis("due")
    ahead.overdue = rows.where(due_ms < ahead.now_ms).count()
    end_ms = ahead.steps[-1].start_ms + ahead.step_ms
    second = F.floor(due_ms / 1000).alias("second")
    seconds = rows.where((due_ms >= ahead.now_ms) & (due_ms < end_ms)).groupBy(second).count()
    step = F.floor((F.col("second") * 1000 - ahead.steps[0].start_ms) / ahead.step_ms).alias("step")
    found = seconds.groupBy(step).agg(F.sum("count").alias("messages"), F.max("count").alias("peak"))
    for row in found.collect():
        one = ahead.steps[min(max(int(row["step"]), 0), len(ahead.steps) - 1)]
        one.pending, one.peak_per_s = int(row["messages"]), int(row["peak"])
    for one in ahead.steps:
        one.expected = one.low = one.high = float(one.pending)


def _learn(spark: SparkSession, events: DataFrame, ahead: LoadForecast) -> None:
    """Add the messages still to be put for each step, as the weeks before show them."""
    put = events.where(is_kind("put") & F.col("due").isNotNull()).select(
        F.unix_millis("due").alias("due_ms"), (F.unix_millis("due") - F.unix_millis("time")).alias("lead_ms")
    )  # fmt: skip
    span = put.agg(F.min("due_ms").alias("a")).head()
    if span is None or span["a"] is None:
        return
    # Whole weeks back from now.
    ahead.weeks = min(52, (ahead.now_ms - int(span["a"])) // WEEK_MS)
    if not ahead.weeks:
        return
    week = F.floor((F.lit(ahead.steps[0].start_ms - 1) - F.col("due_ms")) / WEEK_MS).alias("week")
    since_ms = ahead.steps[0].start_ms - ahead.weeks * WEEK_MS
    past = put.where((F.col("due_ms") >= since_ms) & (F.col("due_ms") < ahead.steps[0].start_ms))
    place = F.floor(((F.col("due_ms") - since_ms) % WEEK_MS) / ahead.step_ms).alias("place")
    steps = spark.createDataFrame(
        [
            (at, int((step.start_ms - since_ms) % WEEK_MS // ahead.step_ms), step.start_ms - ahead.now_ms)
            for at, step in enumerate(ahead.steps)
        ],
        "step int, place long, away_ms long",
    )
    late = (
        past.select(week, place, "lead_ms").join(F.broadcast(steps), "place").where(F.col("lead_ms") < F.col("away_ms"))
    )
    weekly = late.groupBy("step", "week").count()
    told = weekly.groupBy("step").agg(
        F.sum("count").alias("sum"), F.count("*").alias("weeks"),
        F.min("count").alias("low"), F.max("count").alias("high"),
    )  # fmt: skip
    for row in told.collect():
        one = ahead.steps[row["step"]]
        one.expected += row["sum"] / ahead.weeks
        one.low += row["low"] if row["weeks"] >= ahead.weeks else 0
        one.high += row["high"]


def _settled_per_s(events: DataFrame) -> float:
    """Return what a consumer settles in a busy second: the 95th percentile per consumer, and their median."""
    second = F.date_trunc("second", "time").alias("second")
    busy = events.where(is_kind("acked")).groupBy("consumer", second).count()
    each = busy.groupBy("consumer").agg(F.percentile_approx("count", 0.95).alias("rate"))
    found = each.agg(F.percentile_approx("rate", 0.5).alias("rate")).head()
    return float(found["rate"] or 0) if found is not None else 0.0


def forecast_page(ahead: LoadForecast) -> str:
    """Return the forecast as a page."""
    seconds = "" if ahead.step_ms % MINUTE_MS == 0 else ":%S"
    names = [as_datetime(step.start_ms).strftime(f"%a %d %H:%M{seconds}") for step in ahead.steps]
    series = {
        "expected": [step.expected for step in ahead.steps],
        "pending already": [float(step.pending) for step in ahead.steps],
    }
    band = [step.low for step in ahead.steps], [step.high for step in ahead.steps]
    spikes = [
        (as_datetime(step.start_ms).strftime(f"%Y-%m-%d %H:%M{seconds}"), round(step.expected), round(step.low),
         round(step.high), step.peak_per_s)
        for step in ahead.spikes
    ]  # fmt: skip
    history = f"{ahead.weeks} weeks of history" if ahead.weeks else "no history: only what is pending"
    under = f"topic {ahead.topic}, from {as_datetime(ahead.now_ms):%Y-%m-%d %H:%M} UTC, {history}"
    rate = f"{ahead.per_consumer_s:,.0f}/s" + (" (as the journal shows)" if ahead.measured else "")
    values = [
        ("pending", f"{sum(step.pending for step in ahead.steps):,}"), ("overdue now", f"{ahead.overdue:,}"),
        ("expected", f"{round(sum(step.expected for step in ahead.steps)):,}"),
    ]  # fmt: skip
    if ahead.consumers:
        values += [("consumers needed", f"{ahead.consumers:,}"), ("by one consumer", rate)]
    heads = ("from", "expected", "low", "high", "most in a second, of what is pending")
    load = section("Load ahead", lines("messages due per step", names, series, band))
    peaks = section("Spikes", table(heads, spikes) if spikes else paragraph("none stands out", "good"))
    return page("Load ahead", under, [tiles(values), load, peaks, _by_hour(ahead)])


def _by_hour(ahead: LoadForecast) -> str:
    hours: dict[int, float] = {}
    for step in ahead.steps:
        hour = as_datetime(step.start_ms).hour
        hours[hour] = hours.get(hour, 0.0) + step.expected
    return section(
        "By hour of the day, UTC",
        bars("expected by hour", [(f"{hour:02d}", hours[hour]) for hour in sorted(hours)], 24),
    )
