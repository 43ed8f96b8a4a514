"""Writes the figures of design-docs/performance.md and of README.md from results of `timeline bench --json`, which it
records.

    timeline bench --json > result.json                       on a quiet machine, in a clean checkout; or with --quick
    .venv/bin/python scripts/performance_page.py result.json  records it with commit and date, and writes the pages
    .venv/bin/python scripts/performance_page.py              writes the pages again

A result of one scenario (`timeline bench cycle --store redis://… --json`) is recorded the same way. A new result
replaces an older one of the same command. A test compares the pages with the JSON.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timeline.bench.scenario import Scenario
from timeline.bench.scenarios import cluster, holding, http, lateness, schedules, throughput

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "design-docs" / "performance.md"
RESULTS = ROOT / "design-docs" / "performance.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: scripts/performance_page.py writes them -->\n", "<!-- end of the figures -->\n"
HEADLINES = (
    (
        "produce → due → leased → pushed → acked on SQLite, synced before each answer",
        ("cycle", "sqlite://", {"backlog": False, "pending": 0, "api": "list"}),
        "{rate_per_s}/s, {times_beanstalkd_fsync} times beanstalkd with a sync each",
    ),
    (
        "the same on PostgreSQL",
        ("cycle", "postgresql://…", {"backlog": False, "pending": 0, "api": "list"}),
        "{rate_per_s}/s, {times_pgqueuer} times pgqueuer",
    ),
    (
        "due time → your code, at 1,000/s on SQLite",
        ("lateness", "sqlite://", {"pending": 0, "in_zero": False, "lease_ahead": "auto", "rate": 1000.0}),
        "p50 {lateness_p50_ms} ms, p99 {lateness_p99_ms} ms",
    ),
    (
        "produce → due → leased → pushed → acked in memory",
        ("cycle", "memory://", {"backlog": False, "pending": 0, "api": "list"}),
        "{rate_per_s}/s, {times_beanstalkd_memory} times beanstalkd",
    ),
)
"""What the README shows: the row's title, the scenario with its store and settings, and its figures."""
HEAD = "| what | command (`timeline bench …`) | figure | target |\n|---|---|---|---|\n"
LABELS = {
    "rate_per_s": "{}/s",
    "times_bare_store": "{} of the bare store",
    "times_beanstalkd_memory": "{} times",
    "times_beanstalkd_binlog": "{} times with binlog",
    "times_beanstalkd_fsync": "{} times with a sync each",
    "times_celery": "{} times",
    "times_pgqueuer": "{} times",
    "times_procrastinate": "{} times",
    "times_redis-set": "{} times",
    "times_apscheduler": "{} times",
    "times_rq": "{} times",
    "times_nats_memory": "{} times",
    "times_nats_file": "{} times with its file",
    "times_nats_fsync": "{} times with a sync each",
    "broker_cpu_us_per_message": "broker {} µs per message",
    "client_cpu_us_per_message": "client {} µs",
    "answer_p99_ms": "answer p99 {} ms",
    "lateness_p50_ms": "p50 {} ms",
    "lateness_p99_ms": "p99 {} ms",
    "lateness_p99_9_ms": "p99.9 {} ms",
    "lateness_min_ms": "minimum {} ms",
    "store_commit_ms": "commit {} ms",
    "times_none_lateness_p50_ms": "p50 {} times that with none pending",
    "times_none_lateness_p99_ms": "p99 {} times that with none pending",
    "drained_s": "drained in {} s",
    "first_late_ms": "first {} ms late",
    "move_ratio": "move {} times",
    "extend_ratio": "extend {} times",
    "ack_ratio": "ack {} times",
    "cancel_ratio": "cancel {} times",
    "p99_ratio": "others' p99 {} times",
    "first_delivery_s": "first delivery after {} s",
    "beyond_payload_and_id_bytes": "{} bytes per message",
    "broker_resident_mib": "broker {} MiB",
    "plain_per_s": "one by one {}/s",
    "sync_per_s": "without await {}/s",
    "run_per_s": "8 handlers {}/s",
    "consume_per_s": "command {}/s",
    "ack_soon_per_s": "ack_soon {}/s",
    "burst_drained_s": "burst drained in {} s",
    "burst_first_late_ms": "its first {} ms late",
    "brokers_cpu_us_per_message": "brokers {} µs per message",
    "etcd_puts_per_hour": "{} keys written to etcd per hour at rest",
    "delivered_again_s": "delivered again after {} s",
    "broker_at_rest_ms_per_s": "{} ms per second at rest",
    "journal_cost_percent": "journal costs {} %",
    "put_http_per_s": "puts {}/s",
    "put_grpc_per_s": "over gRPC {}/s",
    "batch_http_per_s": "in batches {}/s",
    "batch_grpc_per_s": "over gRPC {}/s",
    "poll_p50_ms": "long poll p50 {} ms",
    "poll_p99_ms": "p99 {} ms",
    "grpc_p99_ratio": "gRPC's p99 beside it {} times",
    "webhook_p50_ms": "p50 {} ms",
    "webhook_p99_ms": "p99 {} ms",
    "webhook_min_ms": "minimum {} ms",
    "backlog_per_s": "{} requests/s",
    "start_more_s": "start {} s longer",
    "at_rest_percent": "{} % of a core at rest",
    "spread_p50_ratio": "spread p50 {} times",
    "spread_p99_ratio": "p99 {} times",
    "moment_p50_ratio": "at one moment p50 {} times",
    "moment_p99_ratio": "p99 {} times",
    "grpc_p50_ms": "over gRPC p50 {} ms",
    "grpc_p99_ms": "p99 {} ms",
    "gateway_resident_mib": "gateway {} MiB",
    "gateway_grown_mib": "{} MiB more than before",
}
"""The figures that the page shows, in order, and their words. The JSON has all others."""
LATE = ("lateness_p50_ms", "lateness_p99_ms", "lateness_p99_9_ms", "lateness_min_ms")
HIDDEN = {"burst": LATE[:3], "cancel-tag": LATE, "lateness": ("broker_cpu_us_per_message",)}
"""Figures that are left out of a scenario's row."""


def scenarios() -> dict[str, type[Scenario]]:
    """Return the scenarios by the names of their commands."""
    found = [
        value for module in (throughput, lateness, holding, cluster, http, schedules) for value in vars(module).values()
    ]
    return {
        kind.name: kind for kind in found if isinstance(kind, type) and issubclass(kind, Scenario) and kind != Scenario
    }


def number(value: float) -> str:
    """Return three digits of a figure, more before the point."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def plain(store: str) -> str:
    """Return a store's URL without the machine's paths and hosts."""
    scheme = store.partition("://")[0]
    return {"memory": "memory://", "sqlite": "sqlite://"}.get(scheme, f"{scheme}://…" if store else "")


def cleaned(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without the machine's paths and hosts."""
    settings = report["settings"] | {"store": plain(report["settings"]["store"])}
    for name in ("sync", "journal"):
        if settings.get(name):
            settings[name] = f"{settings[name].partition('://')[0]}://…"
    store = dict(report["store"])
    if "server" in store:
        store["server"] = re.sub(r", \S*/.*$", "", store["server"])
    return report | {"settings": settings, "store": store, "beside": [cleaned(other) for other in report["beside"]]}


def kind_of(report: dict[str, Any]) -> str:
    """Return the command of a report; a suite's title begins with it."""
    word = report["scenario"].partition(",")[0]
    return {name.replace("-", ""): name for name in scenarios()}.get(word, word)


def command(report: dict[str, Any]) -> str:
    """Return the command that repeats a report, without what runs beside it."""
    kind = scenarios()[kind_of(report)]
    words = [kind.name]
    for field in dataclasses.fields(kind):
        value = report["settings"].get(field.name, field.default)  # an older result lacks newer settings
        if (not field.metadata and field.name not in ("store", "sync")) or value == field.default or value == "":
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def rows(report: dict[str, Any]) -> Iterator[str]:
    """Return the rows of a report: its own figures, then those relative to peers."""
    asked, kind = command(report), kind_of(report)
    peers = [name for name in LABELS if name.startswith("times_") and name.partition("times_")[2] in _peers(report)]
    bare = " --bare" if "times_bare_store" in report["figures"] else ""
    own = [name for name in LABELS if name not in (*peers, *HIDDEN.get(kind, ()))]
    if peers:
        yield _row(report, report["scenario"], asked, [name for name in own if name != "times_bare_store"])
        peer = peers[0].split("_")[1]
        yield _row(report, f"against {peer}", f"{asked} --peer {peer}{bare}", [*peers, "times_bare_store"])
    else:
        yield _row(report, report["scenario"], asked + bare, own)
    for other in report["beside"]:
        if other["scenario"].replace(" ", "_") in _peers(report):
            yield _row(other | {"targets": []}, other["scenario"], f"{asked} --peer {peer}", ["rate_per_s", *LATE])
        if other["scenario"] == "bare push":
            yield _row(other | {"targets": []}, "bare push of gRPC", f"{asked} --bare", LATE)


def _peers(report: dict[str, Any]) -> list[str]:
    names = (other["scenario"].replace(" ", "_") for other in report["beside"])
    return [name for name in names if not name.startswith("bare")]


def _row(report: dict[str, Any], what: str, asked: str, names: Any) -> str:
    targets = {target["figure"]: target for target in report["targets"]}
    figures, wanted = [], []
    for name in names:
        if name not in report["figures"]:
            continue
        value, target = number(report["figures"][name]), targets.get(name)
        if target is not None:
            wanted.append(LABELS[name].format(f"{'≥' if target['least'] else '≤'} {number(target['bound'])}"))
            value = value if target["held"] else f"**{value}**"
        figures.append(LABELS[name].format(value))
    return f"| {what} | `{asked}` | {', '.join(figures)} | {', '.join(wanted)} |"


def figures(results: dict[str, Any]) -> str:
    """Return the part of the page that has the figures: one table for the results of a commit on a day."""
    parts = []
    for (commit, date, where), same in itertools.groupby(results["runs"], _when_and_where):
        runs = [*same]
        reports = [report for run in runs for report in run["scenarios"]]
        loads = sorted(run["machine"]["load_1min"] for run in runs)
        load = f"{loads[0]:g}" if len(loads) == 1 else f"{loads[0]:g} to {loads[-1]:g}"
        parts.append(f"Commit {commit}, {date}, {where}, load {load} before:\n\n")
        parts.append(HEAD + "".join(f"{row}\n" for report in reports for row in rows(report)) + "\n")
        parts += _notes(reports)
        wrong = [f"{report['scenario']}: {sentence}" for report in reports for sentence in report["wrong"]]
        parts += [f"Wrong: {sentence}.\n\n" for sentence in wrong]
    return "".join(parts)


def _when_and_where(run: dict[str, Any]) -> tuple[str, str, str]:
    on = run["machine"]
    return run["commit"], run["date"], f"{on['cpu']}, {on['cores']} cores, {on['system']}, Python {on['python']}"


def _notes(reports: list[dict[str, Any]]) -> list[str]:
    """Return what each peer keeps and how it was driven. The JSON has the other ways that were tried."""
    told = {
        f"{other['scenario']}, beside {report['scenario']}": [
            note[:1].upper() + note[1:].partition("; tried:")[0]
            for note in other["notes"]
            if not note.startswith("does not")
        ]
        for report in reports
        for other in report["beside"]
        if other["notes"] and other["scenario"].replace(" ", "_") in _peers(report)
    }
    return [f"- *{name}*: {'. '.join(notes)}.\n" for name, notes in told.items()] + ["\n"] * bool(told)


def page(text: str, results: dict[str, Any]) -> str:
    """Return the page `text` with the figures of `results`."""
    return _between(text, f"\n{figures(results)}")


def readme(text: str, results: dict[str, Any]) -> str:
    """Return the README `text` with its figures, of the latest `results`."""
    lines = ["| | figure | `timeline bench …` | measured |\n|---|---|---|---|\n"]
    for what, wanted, said in HEADLINES:
        told = {name for _, name, _, _ in string.Formatter().parse(said) if name}
        every = ((report, run["date"]) for run in reversed(results["runs"]) for report in run["scenarios"])
        report, date = next(
            (each for each in every if _is(each[0], *wanted) and told <= each[0]["figures"].keys()), (None, "")
        )
        if report is None:
            raise SystemExit(f"no recorded result has README's row '{what}': record one of {wanted[0]} on {wanted[1]}")
        values = {name: number(value) for name, value in report["figures"].items()}
        peers = "".join(f" --peer {name.split('_')[0]}" for name in _peers(report)[:1])
        lines.append(f"| {what} | {said.format(**values)} | `{command(report)}{peers}` | {date} |\n")
    return _between(text, "".join(lines))


def _is(report: dict[str, Any], kind: str, store: str, settings: dict[str, Any]) -> bool:
    own = report["settings"]
    return kind_of(report) == kind and own["store"] == store and settings.items() <= own.items()


def _between(text: str, written: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{written}{END}{after}"


def recorded(results: dict[str, Any], result: dict[str, Any], commit: str, date: str) -> dict[str, Any]:
    """Return `results` with a new one, in place of older ones of the same command."""
    reports = [cleaned(report) for report in result.get("scenarios", [result])]
    for report in reports:
        report.pop("machine", None)
    peers = [] if "scenarios" in result else [name.split("_")[0] for name in _peers(reports[0])[:1]]
    asked = "suite" if "scenarios" in result else " --peer ".join([command(reports[0]), *peers])
    run = {"asked": asked, "commit": commit, "date": date, "machine": result["machine"], "scenarios": reports}
    return {"runs": [*(old for old in results["runs"] if old["asked"] != asked), run]}


def read() -> dict[str, Any]:
    """Return the committed results; none if there is no file yet."""
    if not RESULTS.exists():
        return {"runs": []}
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main(files: list[str]) -> int:
    """Record the results in `files`, and write the pages."""
    results = read()
    if files and _git("status", "--porcelain", "timeline"):
        print("commit the changes under timeline/ first: a result belongs to a commit", file=sys.stderr)
        return 1
    for file in files:
        result = json.loads(Path(file).read_text(encoding="utf-8"))
        results = recorded(results, result, _git("rev-parse", "--short=10", "HEAD"), str(dt.date.today()))
    if not results["runs"]:
        print("no result is recorded yet: give the file of `timeline bench --json`", file=sys.stderr)
        return 1
    pages = [
        (path, write(path.read_text(encoding="utf-8"), results)) for path, write in ((PAGE, page), (README, readme))
    ]
    if files:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, text in pages:
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
