"""Print which times croniter, Celery beat and Timeline fire when clocks change, as a table for docs/recurring.md.

Run it as `python scripts/clock_changes.py`; it takes four minutes. Each fires `30 1 * * *` and `30 2 * * *` in
America/New_York, as real processes whose clocks go sixty times as fast under libfaketime.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.clock_changes import READY, RULES, TIMELINE, ZONE, Firing, across, end_with_input, fires  # noqa: E402

LENGTH = timedelta(minutes=185)
DAYS = {
    "clocks go back": datetime(2026, 11, 1, 5, 27, tzinfo=UTC),
    "clocks go forward": datetime(2026, 3, 8, 6, 27, tzinfo=UTC),
}
"""From just before the first of the times on. The change is half an hour after it."""
CRONITER, BEAT, OURS = "croniter", "Celery beat", "Timeline"
PROGRAMS = {CRONITER: (__file__, CRONITER), BEAT: (__file__, BEAT), OURS: TIMELINE}
PACKAGES = {CRONITER: "croniter", BEAT: "celery"}


def with_croniter(rules: Mapping[str, str]) -> None:
    """Wait for the next time of croniter, fire, and ask for the one after it: a loop for each rule."""
    from croniter import croniter

    def loop(rule: str, expression: str) -> None:
        times = croniter(expression, datetime.now(ZONE))
        while True:
            when = times.get_next(datetime)
            while (left_s := when.timestamp() - time.time()) > 0:
                time.sleep(left_s)
            fires(rule)

    fires(READY)
    for rule, expression in rules.items():
        threading.Thread(target=loop, args=(rule, expression), daemon=True).start()
    end_with_input()


def with_celery_beat(rules: Mapping[str, str]) -> None:
    """Run Celery beat, its time zone being ZONE. A task fires when beat publishes it."""
    from celery import Celery
    from celery.schedules import crontab
    from celery.signals import before_task_publish

    app = Celery("clock-changes", broker="memory://")  # current: its crontabs ask that for the zone
    fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    app.conf.update(
        timezone=ZONE.key,
        task_ignore_result=True,
        beat_schedule={
            rule: {"task": rule, "schedule": crontab(**dict(zip(fields, expression.split(), strict=True)))}
            for rule, expression in rules.items()
        },
    )

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def published(sender: str, **_: object) -> None:
        fires(sender)

    threading.Thread(target=end_with_input, daemon=True).start()
    fires(READY)
    with tempfile.TemporaryDirectory() as folder:
        app.Beat(schedule=str(Path(folder) / "beat"), loglevel="ERROR", quiet=True).run()


async def fired_on(program: str, begin: datetime, folder: Path) -> list[Firing]:
    """Return what a program fired on a day."""
    place = folder / f"{program}-{begin:%m}"
    place.mkdir()
    return await across(PROGRAMS[program], begin, begin + LENGTH, place)


async def measured(folder: Path) -> dict[tuple[str, str], list[Firing]]:
    """Run all at once. Return what fired, by program and day."""
    wanted = [(program, day) for program in PROGRAMS for day in DAYS]
    found = await asyncio.gather(*(fired_on(program, DAYS[day], folder) for program, day in wanted))
    return dict(zip(wanted, found, strict=True))


def cell(fired: Iterable[Firing], rule: str) -> str:
    """Return the times of a rule."""
    return ", ".join(one.shown for one in fired if one.rule == rule) or "never"


def main() -> None:
    if peer := sys.argv[1:]:
        {CRONITER: with_croniter, BEAT: with_celery_beat}[peer[0]](**json.loads(sys.stdin.readline()))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(Path(folder)))
    columns = [(day, rule) for day in DAYS for rule in RULES]
    print("| |", " | ".join(f"{day}, `{RULES[rule]}`" for day, rule in columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for program in PROGRAMS:
        name = f"{program} {version(PACKAGES[program])}" if program in PACKAGES else program
        print(f"| {name} |", " | ".join(cell(found[program, day], rule) for day, rule in columns), "|")


if __name__ == "__main__":
    main()
