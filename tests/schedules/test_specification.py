"""What a schedule may say, how it is shown as JSON, and how a mistake is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.schedules.samples import FULL, spec
from timeline.errors import Invalid, TooLarge
from timeline.recurrence import FoldPolicy, GapPolicy
from timeline.schedules import CatchUp, Overlap, Specification
from timeline.schedules.specification import MOST_TEMPLATE_BYTES


def test_json_says_all_of_it_and_reads_it_again() -> None:
    assert (FULL.gap, FULL.fold, FULL.catch_up) == (GapPolicy.SKIP, FoldPolicy.BOTH, CatchUp.ALL)
    for one in (FULL, spec()):
        assert Specification.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert FULL.to_json()["payload"] == "AP97b2NjdXJyZW5jZX0="
    assert spec().to_json() | {"payload": ""} == {
        "topic": "invoices",
        "name": "monthly",
        "cron": ["0 6 1 * *"],
        "every_ms": 0,
        "rrule": [],
        "exclude": [],
        "start_ms": 0,
        "end_ms": 0,
        "count": 0,
        "zone": "UTC",
        "gap": None,
        "fold": None,
        "jitter_ms": 0,
        "catch_up": "latest",
        "window_ms": 3_600_000,
        "overlap": "allow",
        "payload": "",
        "headers": {},
        "tag": "",
        "group": "default",
        "expires_ms": 0,
        "paused": False,
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ".."}, "a schedule's name is 1 to 100 letters, digits, '.', '_' and '-', not '..'"),
        ({"name": "a/b"}, "a schedule's name is 1 to 100 letters, digits, '.', '_' and '-', not 'a/b'"),
        ({"name": ""}, "a schedule's name is"),
        ({"name": "n" * 101}, "a schedule's name is"),
        ({"name": "day\n"}, "a schedule's name is"),
        ({"name": 5}, "a schedule's name is"),
        ({"topic": ""}, "a topic's name is"),
        ({"topic": "~schedules"}, "is an internal topic: a schedule produces into one of your own"),
        ({"topic": "t" * 140, "name": "n" * 90}, "may take 229 bytes together, not 230: give the schedule a shorter"),
        ({"cron": ()}, "a schedule needs a rule"),
        ({"cron": "61 * * * *"}, "the minute of cron '61 * * * *' must be 0 to 59"),
        ({"cron": 5}, "cron must be a text or a list of texts, not 5"),
        ({"cron": [5]}, "cron must be a text or a list of texts"),
        ({"exclude": ["x" * 1_001]}, "exclude may have 1000 texts of 1000 characters"),
        ({"every_ms": -1}, "every must be 0 to 36600d, not -1ms"),
        ({"every_ms": 999}, "every must be at least 1s, not 999 ms"),
        ({"every_ms": True}, "every must be"),
        ({"jitter_ms": 86_400_001}, "jitter must be 0 to 1d, not 86400001ms"),
        ({"window_ms": "1h"}, "window must be 0 to 366d, not '1h'"),
        ({"start_ms": 2**62}, "start must be"),
        ({"zone": "Mars"}, "no time zone 'Mars' is known here"),
        ({"zone": 5}, "zone must be a name like 'Europe/Berlin', not 5"),
        ({"gap": "maybe"}, "gap must be later, skip, not 'maybe'"),
        ({"fold": "third"}, "fold must be first, second, both, not 'third'"),
        ({"catch_up": "some"}, "catch_up must be none, latest, all, not 'some'"),
        ({"overlap": None}, "overlap must be allow, skip, queue, not None"),
        ({"payload": "text"}, "payload must be bytes, not str"),
        ({"headers": []}, "headers are strings by strings, not list"),
        ({"headers": {"a": 5}}, "headers are strings by strings, not int: 5"),
        ({"tag": "t" * 65}, "tag must be text of 0 to 64 bytes of UTF-8"),
        ({"tag": "\ud800"}, "half of a surrogate pair"),
        ({"group": ""}, "group must be text of 1 to 255 bytes"),
        ({"paused": 1}, "paused must be true or false, not 1"),
    ],
)
def test_a_mistake_is_refused_by_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        spec(**fields)
    assert said in str(refused.value)


def test_a_template_has_bounds() -> None:
    with pytest.raises(TooLarge, match="payload takes 1048577 bytes; a schedule's may take 1048576"):
        spec(payload=bytes(MOST_TEMPLATE_BYTES + 1))
    with pytest.raises(TooLarge, match="they may take 8192"):
        spec(headers={"a": "b" * 8192})


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ([], "a schedule is an object of JSON"),
        ({"topic": "t", "name": "n", "corn": ""}, "a schedule has no field 'corn'. Its fields are topic, name, cron"),
        ({"topic": "t", "cron": "* * * * *"}, "a schedule needs a name"),
        ({"topic": "t", "name": "n", "cron": "* * * * *", "payload": "%"}, "payload must be text in base64, not '%'"),
        ({"topic": "t", "name": "n", "cron": "* * * * *", "payload": 5}, "payload must be text in base64, not 5"),
    ],
)
def test_json_that_is_none_of_ours_is_refused(shown: object, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        Specification.from_json(shown)
    assert said in str(refused.value)


def test_changed_takes_fields_and_refuses_others() -> None:
    assert spec().changed(overlap="skip", cron="@daily") == spec(overlap=Overlap.SKIP, cron=("@daily",))
    with pytest.raises(Invalid, match="has no field 'corn'"):
        spec().changed(corn="")
    with pytest.raises(Invalid, match="the name of a schedule cannot be changed"):
        spec().changed(name="yearly")


def test_its_words_are_those_of_its_rules() -> None:
    assert spec(zone="Europe/Berlin").words() == "At 06:00 on the first day of every month, in Europe/Berlin"


@pytest.mark.slow
def test_without_the_packages_that_read_rules_the_broker_checks_them() -> None:
    script = """
import sys
sys.modules["cronsim"] = sys.modules["dateutil"] = None
from timeline.errors import Invalid
from timeline.schedules import Specification
one = Specification("t", "n", cron="61 * * * *", gap="skip")
assert Specification.from_json(one.to_json()) == one
try:
    one.words()
except Invalid as refused:
    print(refused)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "rules are read by cronsim and python-dateutil: pip install 'timeline-scheduler[schedules]'" in done.stdout
