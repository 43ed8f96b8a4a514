"""Stories of schedules by seed: looks, edits, pauses, outages, crashes at each step, and a judge. Mistakes that are
planted must be found."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from tests.schedules.judge import judge
from tests.schedules.samples import spec
from tests.schedules.world import World
from timeline.schedules import edits, looks
from timeline.schedules.record import RenamedSpan, ScheduleRecord

RULES: tuple[dict[str, Any], ...] = (
    {"cron": "* * * * *"},
    {"cron": "*/2 * * * *"},
    {"cron": "*/7 * * * * *"},
    {"cron": "*/20 * * * * *", "exclude": ["cron:*/2 * * * *"]},
    {"cron": (), "every_ms": 45_500},
    {"cron": ("*/3 * * * *", "* * * * *"), "every_ms": 90_000},
    {"cron": "0,1,2,30 * * * * *"},
)
CLEAR = {"cron": (), "every_ms": 0, "exclude": ()}


def some_fields(rng: random.Random, label: int) -> dict[str, Any]:
    """Some specification, but for its overlap."""
    return {
        **CLEAR,
        **rng.choice(RULES),
        "payload": b"r%d {occurrence} {sequence}" % label,
        "jitter_ms": rng.choice((0, 0, 0, 40_000)),
        "catch_up": rng.choice(("none", "latest", "all")),
        "window_ms": rng.choice((60_000, 600_000, 3_600_000)),
        "expires_ms": rng.choice((0, 0, 0, 120_000)),
    }


class Story:
    """One story, by its seed."""

    def __init__(self, seed: int, mistake: str = "") -> None:
        self.rng = random.Random(seed)
        overlap = self.rng.choice(("allow", "allow", "skip", "queue"))
        work_ms = self.rng.choice((0, 5_000, 100_000)) if overlap != "allow" else 0
        self.world = World(self.rng, work_ms, mistake)
        self.label = 0
        self.edits = self.rng.random() < 0.7
        self.crash = self.rng.choice((0.0, 0.02, 0.1, 0.3))
        self.world.begin(spec(name="each", overlap=overlap, **some_fields(self.rng, 0)))

    def tell(self) -> Counter[str]:
        world, rng = self.world, self.rng
        for _ in range(rng.randrange(3, 12)):
            world.run_until(world.now_ms + rng.randrange(1, 200_000), self.crash)
            what = rng.random()
            if what < 0.15:
                world.outage(rng.choice((5_000, 50_000, 100_000, 700_000)))
            elif what < 0.25:
                world.busy = not world.busy
            elif self.edits:
                self.edit()
        world.busy = False
        self.label += 1
        world.update(paused=False, payload=b"r%d {occurrence} {sequence}" % self.label)
        if not self.edits:
            world.actors.pop()
        world.run_until(world.now_ms + 400_000)
        return judge(world, set(world.kept))

    def edit(self) -> None:
        rng, world = self.rng, self.world
        self.label += 1
        template = b"r%d {occurrence} {sequence}" % self.label
        what = rng.random()
        fields: dict[str, Any] = {"payload": template}
        if what < 0.25:
            fields["paused"] = True
        elif what < 0.6:
            fields["paused"] = False
        elif what < 0.85:
            fields |= some_fields(rng, self.label)
        elif what < 0.92:
            fields["group"] = rng.choice(("default", "other"))
        world.update(rng.random() < 0.15, **fields)
        for _ in range(rng.randrange(4)):  # others act between its steps
            world.lease()
            world.step(self.crash)


def tell(seeds: range, mistake: str = "") -> tuple[Counter[str], int]:
    """Tell the stories. Return what was seen, and in how many the judge found something."""
    seen: Counter[str] = Counter()
    wrong = 0
    for seed in seeds:
        try:
            seen += Story(seed, mistake).tell()
        except AssertionError as found:
            if not mistake:
                raise AssertionError(f"story {seed}: {found}") from found
            wrong += 1
    return seen, wrong


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.prove) for part in (1, 2, 3))])
def test_stories_come_to_what_they_should(part: int) -> None:
    seen, _ = tell(range(part * 50, part * 50 + 50))
    assert seen["delivered"] > 500
    assert seen["absent"] > 50


@pytest.mark.prove
@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_stories(part: int) -> None:
    seen, _ = tell(range(10_000 + part * 500, 10_000 + part * 500 + 500))
    assert seen["delivered"] > 10_000


def _no_spans(*_: object) -> list[RenamedSpan]:
    return []


def _never_replaces(*arguments: Any) -> looks.ScheduledMessage:
    return dataclasses.replace(MESSAGE_OF(*arguments), replace=False)


def _counts_again(decision: Any) -> dict[str, Any]:
    changes = CHANGES(decision)
    again = changes["missed"] - decision._record.missed
    return changes | {"missed": changes["missed"] + again}


def _forgets_what_was_decided(record: ScheduleRecord, *arguments: Any) -> edits.Edit:
    edit = RENEWED(record, *arguments)
    return dataclasses.replace(edit, record=dataclasses.replace(edit.record, decided=()))


MESSAGE_OF, CHANGES, RENEWED = looks.message_of, looks._Decision.changes, edits._renewed
PLANTED: dict[str, tuple[Any, str, Any]] = {
    "an edit without new names": (edits, "_spans", _no_spans),
    "an edit that drops what was decided": (edits, "_renewed", _forgets_what_was_decided),
    "no replacement": (looks, "message_of", _never_replaces),
    "missed counted twice": (looks._Decision, "changes", _counts_again),
    "what is only late counts as missed": (looks, "LATE_MS", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["successor first", "forgets cancels", "puts what it decides", *PLANTED])
def test_the_judge_finds_a_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake in PLANTED:
        monkeypatch.setattr(*PLANTED[mistake])
    for begin in range(0, 400, 10):
        _, wrong = tell(range(begin, begin + 10), mistake)
        if wrong:
            return
    raise AssertionError("not found in 400 stories")
