"""Celery without beat: the entries of beat_schedule become schedules, and this bridge starts the tasks at their times.

Beat is one process. If it stops, nothing starts, and a second one starts every task twice. Schedules are run by all
brokers together, and as many bridges as you like may run. Your tasks and workers stay as they are.

    timeline serve
    python examples/replace_celery_beat.py

In your project, import your own `app`. Run the bridge in place of `celery beat`, without the lines marked "here only".
"""

import json
import os
import re
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.schedules import crontab

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
TOPIC = "celery-beat"

app = Celery("shop", broker="memory://")
app.conf.timezone = "Europe/Berlin"
app.conf.task_always_eager = True  # here only: it needs no worker
app.conf.beat_schedule = {
    "close the month": {"task": "shop.close_month", "schedule": crontab(minute=0, hour=6, day_of_month=1)},
    "check stock": {"task": "shop.check_stock", "schedule": crontab(minute="*/15", day_of_week="mon-fri")},
    "pulse": {"task": "shop.pulse", "schedule": 1.0, "args": ("north",), "options": {"expires": 5}},
}


@app.task(name="shop.close_month")
def close_month() -> None:
    print("the month is closed")


@app.task(name="shop.check_stock")
def check_stock() -> None:
    print("stock is checked")


@app.task(name="shop.pulse")
def pulse(store: str) -> None:
    print(f"pulse of {store}")


def rule_of(when: crontab | timedelta | float) -> dict[str, Any]:
    """Return a beat entry's rule as `tl.schedule` takes it. Raise ValueError for one that cron cannot say."""
    if not isinstance(when, crontab):
        return {"every": when}  # beat counts from its own start, Timeline from a fixed time: a restart shifts nothing
    minute, hour, weekday, day, month = when.__reduce__()[1]
    if not str(day).startswith("*") and not str(weekday).startswith("*"):
        raise ValueError(f"{when}: Celery wants both days to match, cron either. Use rrule with BYMONTHDAY and BYDAY")
    fields = (minute, hour, day, month, weekday)
    return {"cron": " ".join(str(one) if isinstance(one, str | int) else ",".join(map(str, one)) for one in fields)}


def take_over(tl: timeline.SyncTimeline) -> list[timeline.SyncSchedule]:
    """Make a schedule of each entry. A schedule that is there already stays as it is."""
    made = []
    for name, entry in app.conf.beat_schedule.items():
        options = dict(entry.get("options", {}))  # the queue, the priority and so on
        expires = options.pop("expires", None)
        made.append(
            tl.schedule(
                TOPIC,
                re.sub(r"[^\w.-]", "-", name),
                **rule_of(entry["schedule"]),
                zone=str(app.conf.timezone),
                headers={"task": entry["task"]},
                payload=json.dumps([entry.get("args", ()), entry.get("kwargs", {}), options]),
                expires=expires,
            )
        )
    return made


def start(d: timeline.SyncDelivery) -> None:
    args, kwargs, options = json.loads(d.payload)
    app.tasks[d.headers["task"]].apply_async(args, kwargs, task_id=d.id, **options)


def main() -> None:
    with timeline.connect_sync(ADDRESS) as tl:
        tl.create_topic(TOPIC)
        schedules = take_over(tl)
        for schedule in schedules:
            print(f"{schedule.name}: {schedule.specification.words()}")
        schedules[0].trigger()  # here only: the first of the month may be far away
        with tl.consumer(TOPIC) as c:
            for number, d in enumerate(c, 1):
                start(d)
                d.ack()
                if number == 4:  # here only: the bridge runs until it is ended
                    break
        for schedule in schedules:  # here only: a trial leaves no schedule behind
            schedule.delete()


if __name__ == "__main__":
    main()
