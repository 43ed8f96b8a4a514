"""An audit as a page for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from timeline.driver.times import as_datetime
from timeline.pipeline.audit import PERCENTILES, PROMISES, Audit, silence
from timeline.pipeline.page import bars, folded, lines, page, paragraph, section, table, tiles

_SHOWN = [f"p{100 * share:g}" if share < 1 else "most" for share in PERCENTILES]


def audit_page(found: Audit, source: str) -> str:
    """The whole page; `source`: where the journal is."""
    under = f"{source}, {_when(found.since_ms)} to {_when(found.until_ms)} UTC"
    parts = [
        _verdict(found),
        _glance(found),
        _lateness(found),
        _late(found),
        _again(found),
        _open(found),
        _stories(found),
    ]
    return page("What happened to every message", under, parts)


def _when(millis: int) -> str:
    return as_datetime(millis).strftime("%Y-%m-%d %H:%M:%S") if millis else "–"


def _verdict(found: Audit) -> str:
    said: list[str] = []
    for name, count in found.broken.items():
        said.append(paragraph(f"Broken for {count:,} messages: {PROMISES[name]}", "bad"))
    said += [paragraph(f"Not known: {sentence}.", "bad") for sentence in silence(found)]
    if not found.broken and found.events:
        checked = [
            text.partition(":")[0] for name, text in PROMISES.items() if name != "lost" or found.pending is not None
        ]
        said.append(paragraph(f"Kept for every message: {', '.join(checked)}.", "good"))
    if found.pending is None:
        said.append(
            paragraph(
                "What lies on the timelines was not looked at: nothing could be called lost (--topic or --backup).",
                "soft",
            )
        )
    for gap in found.gaps:
        what = f"{_missing(gap.events)} of broker {gap.broker} are missing"
        said.append(paragraph(f"Not known: {what}, from {_when(gap.since_ms)} to {_when(gap.until_ms)}.", "bad"))
    if found.unknown:
        said.append(
            paragraph(
                f"Not known: {found.unknown:,} messages are not on the timeline, and what ended them may be missing in "
                "the journal, or not be written yet.",
                "soft",
            )
        )
    if found.unended:
        named = ", ".join(sorted(set(found.unended))[:10])
        said.append(
            paragraph(
                f"{len(found.unended)} broker sessions never said that they ended, being running or killed: {named}.",
                "soft",
            )
        )
    rows = [
        (row["promise"], row["topic"], row["id"], row["put"], row["last"], row["ended"], row["delivered"])
        for row in found.examples
    ]
    if rows:
        said.append(table(("promise", "topic", "id", "put", "last seen", "last event", "deliveries"), rows))
    return section("The promises", *said)


def _missing(events: int) -> str:
    return f"{events:,} events" if events else "events, nobody knows how many,"


def _glance(found: Audit) -> str:
    told = found.messages
    names = ("put", "delivered", "acked", "moved", "cancelled", "buried", "redelivered", "open")
    values = [(name, f"{told.get(name, 0):,}") for name in names]
    rows = [(kind.replace("_", " "), count) for kind, count in found.events.items()]
    return section("Messages", tiles(values), folded("events by kind", table(("event", "how many"), rows)))


def _ms(value: Any) -> str:
    return f"{value:,} ms" if value is not None and value < 10_000 else f"{(value or 0) / 1000:,.1f} s"


def _lateness(found: Audit) -> str:
    heads = ("", "deliveries", "least", *_SHOWN)
    parts: list[str] = []
    names = [_bucket(row["bucket"]) for row in found.histogram]
    counts = [float(row["count"]) for row in found.histogram]
    parts.append(bars("first deliveries by lateness", list(zip(names, counts, strict=True))))
    fine = found.lateness.get("time", [])
    steps = fine or found.lateness.get("hour", [])
    if steps:
        series = {_SHOWN[at]: [float(row["at"][at] or 0) for row in steps] for at in (0, 2, 3)}
        names = [row["of"][11 if fine else 5 :] for row in steps]
        parts.append(lines("lateness over time", names, series, axis=_short_ms))
    for name in ("topic", "consumer"):
        rows = [
            (row["of"] or "–", row["deliveries"], _ms(row["least"]), *(_ms(value) for value in row["at"]))
            for row in found.lateness.get(name, [])[:100]
        ]
        parts.append(folded(f"by {name}", table(heads, rows)) if name == "consumer" else table(heads, rows))
    return section("Lateness: from due to handed to the wire, first deliveries", *parts)


def _short_ms(value: float) -> str:
    """Of an axis."""
    return f"{value:.3g} ms" if value < 1_000 else f"{value / 1_000:.3g} s"


def _bucket(number: int) -> str:
    return "0 ms" if number == 0 else _ms(1 << (number - 1)) if number == 1 else f"≥{_ms(1 << (number - 1))}"


def _late(found: Audit) -> str:
    if not found.late:
        return section("Late by more than 50 ms", paragraph("nothing", "good"))
    rows = [(cause.replace("_", " "), count) for cause, count in found.late.items()]
    return section(
        "Late by more than 50 ms, and why", bars("late deliveries by cause", [(n, float(c)) for n, c in rows])
    )


def _again(found: Audit) -> str:
    words = {
        "ran_out": "lease ran out",
        "released": "released",
        "handed_back": "handed back unseen",
        "relet": "same holder, new session",
    }
    rows = [(words[kind], count) for kind, count in found.redelivered.items()]
    if not rows:
        return section("Given again", paragraph("nothing", "good"))
    return section(
        "Given again, and why", bars("redeliveries by cause", [(name, float(count)) for name, count in rows])
    )


def _open(found: Audit) -> str:
    told = f"{found.open:,} messages were put and not settled by the end"
    there = "" if found.pending is None else f"; {found.pending:,} of them are on the timeline still"
    return section("Not settled", paragraph(f"{told}{there}."))


def _stories(found: Audit) -> str:
    parts: list[str] = []
    for id, events in found.stories.items():
        rows = [
            (
                _time(one["time"]),
                one["kind"].replace("_", " "),
                one["topic"],
                one["version"],
                _time(one["due"]),
                one["lateness"],
                one["consumer"],
                one["cause"],
            )
            for one in events
        ]
        heads = ("time", "event", "topic", "version", "due", "late by, ms", "consumer", "cause or reason")
        parts.append(folded(f"{id}: {len(events)} events", table(heads, rows)))
    return section("Stories", *(parts or [paragraph("none asked for", "soft")]))


def _time(at: datetime | None) -> str:
    return at.strftime("%m-%d %H:%M:%S.%f")[:-3] if at is not None else "–"
