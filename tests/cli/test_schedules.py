"""`timeline schedule …` at a real broker: tables, JSON, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Call

pytestmark = pytest.mark.processes
MONTHLY = ("--cron", "0 6 1 * *", "--zone", "Europe/Berlin", "--payload", "invoices of {occurrence}")


@pytest.fixture
def monthly(topic: str, tell: Call) -> str:
    """A topic with a schedule `monthly`."""
    assert tell("schedule", "create", topic, "monthly", *MONTHLY).code == 0
    return topic


def test_create_says_what_it_made_and_when_it_is_next(topic: str, tell: Call) -> None:
    done = tell("schedule", "create", topic, "monthly", *MONTHLY)
    first, second = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert first.startswith(f"created {topic}/monthly: At 06:00 on ") and first.endswith(", in Europe/Berlin")
    assert re.fullmatch(r"next \w{3} \d{4}-\d\d-01 06:00:00\+0[12]:00, in \d+.*", second)
    done = tell("schedule", "create", topic, "monthly", *MONTHLY)
    assert done.code == 0 and done.out.startswith(f"there already: {topic}/monthly: ")
    done = tell("schedule", "create", topic, "monthly", "--every", "15m")
    assert done.code == 4
    assert done.err.startswith(
        f"timeline: EXISTS: {topic} has another schedule 'monthly', which differs in cron, every"
    )


def test_every_option_of_create_reaches_the_schedule(topic: str, tell: Call, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"\xff\x00")
    done = tell(
        *("schedule", "create", topic, "all", "--cron", "@daily", "--cron", "0 9 * * *", "--every", "1h"),
        *("--rrule", "FREQ=DAILY;BYHOUR=23", "--exclude", "2026-12-25", "--exclude", "cron:* * 1 1 *"),
        *("--zone", "Europe/Berlin", "--gap", "skip", "--fold", "both", "--start", "2027-01-01T00:00"),
        *("--end", "2028-01-01T00:00Z", "--count", "100", "--jitter", "5m", "--catch-up", "all", "--window", "2h"),
        *("--overlap", "skip", "--payload-file", tmp_path / "payload", "--header", "a=b=c", "--tag", "t"),
        *("--group", "g", "--expires", "30m", "--paused", "--json"),
    )
    assert (done.code, done.err) == (0, "")
    (made,) = done.json
    expected = {
        "topic": topic, "name": "all", "state": "paused", "revision": 1, "cron": ["@daily", "0 9 * * *"],
        "every_ms": 3_600_000, "rrule": ["FREQ=DAILY;BYHOUR=23"], "exclude": ["2026-12-25", "cron:* * 1 1 *"],
        "zone": "Europe/Berlin", "gap": "skip", "fold": "both", "start": "2026-12-31T23:00:00.000Z",
        "end": "2028-01-01T00:00:00.000Z", "count": 100, "jitter_ms": 300_000, "catch_up": "all",
        "window_ms": 7_200_000, "overlap": "skip", "payload_base64": "/wA=", "headers": {"a": "b=c"}, "tag": "t",
        "group": "g", "expires_ms": 1_800_000, "paused": True,
    }  # fmt: skip
    assert {name: made.get(name) for name in expected} == expected


def test_ls_shows_what_is_there(monthly: str, tell: Call) -> None:
    assert tell("schedule", "create", monthly, "b", "--every", "15m", "--paused").code == 0
    head, *rows = tell("schedule", "ls", monthly, "--tz", "UTC").out.splitlines()
    assert head.split() == ["NAME", "STATE", "NEXT", "MISSED", "RULE"]
    assert rows[0].split()[:3] == ["b", "paused", "–"] and rows[0].endswith("every 15m")
    assert rows[1].split()[:2] == ["monthly", "active"] and rows[1].endswith("0 6 1 * * Europe/Berlin")
    assert f"{monthly}  " in tell("schedule", "ls").out
    listed = tell("schedule", "ls", monthly, "--json").json
    assert [(one["name"], one["missed"], one["payload"]) for one in listed] == [
        ("b", 0, ""),
        ("monthly", 0, "invoices of {occurrence}"),
    ]


def test_an_empty_list_says_how_to_make_one(topic: str, tell: Call) -> None:
    done = tell("schedule", "ls", topic)
    assert done.code == 0 and done.out.startswith(f"there are no schedules of {topic}: 'timeline schedule create")
    assert "there is no topic 'absent'" in tell("schedule", "ls", "absent").err


def test_show_has_the_fields_and_the_next_times(monthly: str, tell: Call) -> None:
    done = tell("schedule", "show", monthly, "monthly", "--next", "2")
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in done.out.split("\n\n")[0].splitlines())
    assert (fields["state"], fields["produced"], fields["missed"]) == ("active", "0", "0")
    assert (fields["rule"], fields["catch up"]) == ("0 6 1 * * Europe/Berlin", "latest, at most 1h back")
    assert fields["payload"] == "invoices of {occurrence}" and fields["revision"].startswith("1, created 20")
    head, *times = done.out.split("\n\n")[1].splitlines()
    assert head.split() == ["when", "in", "clocks"] and len(times) == 2
    (shown,) = tell("schedule", "show", monthly, "monthly", "--next", "2", "--json").json
    assert [time[8:19] for time in shown["times"]] == ["01T06:00:00"] * 2 and shown["next"][:8] == shown["times"][0][:8]


def test_a_schedule_that_is_not_there_is_named_with_those_that_are(monthly: str, tell: Call) -> None:
    for command in ("show", "pause", "resume", "trigger", "delete"):
        done = tell("schedule", command, monthly, "montly")
        assert (done.code, done.out) == (4, "")
        assert f"NOT_FOUND: {monthly} has no schedule 'montly'. There are: monthly." in done.err
    done = tell("schedule", "show", "absent", "x")
    assert done.code == 4 and "there is no topic 'absent'" in done.err


def test_update_changes_what_is_given_and_replaces_rules(monthly: str, tell: Call) -> None:
    done = tell("schedule", "update", monthly, "monthly", "--every", "1h", "--header", "a=b", "--if-revision", "1")
    assert done.code == 0 and done.out.startswith(f"updated {monthly}/monthly: Every 1h, in Europe/Berlin")
    (shown,) = tell("schedule", "show", monthly, "monthly", "--json").json
    assert (shown["cron"], shown["every_ms"], shown["headers"], shown["revision"]) == ([], 3_600_000, {"a": "b"}, 2)
    done = tell(
        "schedule", "update", monthly, "monthly", "--header", "", "--payload", "", "--start", "2027-06-01T00:00",
        "--pending", "keep", "--json",
    )  # fmt: skip
    (shown,) = done.json
    assert (shown["headers"], shown["payload"], shown["start"]) == ({}, "", "2027-05-31T22:00:00.000Z")
    (shown,) = tell("schedule", "update", monthly, "monthly", "--start", "", "--gap", "rule", "--json").json
    assert (shown["start"], shown["gap"], shown["revision"]) == (None, None, 4)
    done = tell("schedule", "update", monthly, "monthly", "--every", "2h", "--if-revision", "1")
    assert done.code == 4 and done.err.startswith("timeline: FENCED: ") and "revision" in done.err
    done = tell("schedule", "update", monthly, "monthly")
    assert done.code == 2 and "give at least one option to change" in done.err


def test_pause_trigger_resume(monthly: str, tell: Call) -> None:
    assert tell("schedule", "pause", monthly, "monthly").out.startswith(f"paused {monthly}/monthly")
    shown = tell("schedule", "show", monthly, "monthly").out
    assert "paused: 'timeline schedule resume" in shown
    done = tell("schedule", "trigger", monthly, "monthly")
    assert done.code == 0 and re.match(r"monthly@[\dT:.-]+Z\.trigger produced, due ", done.out)
    (receipt,) = tell("schedule", "trigger", monthly, "monthly", "--json").json
    assert receipt["status"] == "OK"
    assert "from schedule monthly: triggered by hand at" in tell("why", monthly, receipt["id"]).out
    (why,) = tell("why", monthly, receipt["id"], "--json").json
    assert why["schedule"]["name"] == "monthly" and why["schedule"]["triggered"]
    assert tell("schedule", "resume", monthly, "monthly").out.startswith(f"resumed {monthly}/monthly")


def test_backfill_counts_and_produces(monthly: str, tell: Call) -> None:
    span = ("--from", "2026-01-01T00:00", "--to", "2026-04-01T00:00")
    done = tell("schedule", "backfill", monthly, "monthly", *span, "--dry-run")
    assert (done.code, done.out) == (0, "3 would be produced\n")
    assert tell("schedule", "backfill", monthly, "monthly", *span).out == "3 produced\n"
    assert [one["id"] for one in tell("ls", monthly, "--json").json] == [
        "monthly@2026-01-01T05:00:00Z", "monthly@2026-02-01T05:00:00Z", "monthly@2026-03-01T05:00:00Z",
    ]  # fmt: skip
    again = tell("schedule", "backfill", monthly, "monthly", *span, "--json").json
    assert again == [{"produced": 0, "present": 3, "failed": 0, "dry_run": False}]
    done = tell("schedule", "backfill", monthly, "monthly", *span[:2], "--to", "2025-01-01T00:00")
    assert done.code == 2 and "--from must lie before --to" in done.err


def test_delete(monthly: str, tell: Call) -> None:
    assert tell("schedule", "delete", monthly, "monthly").out == f"deleted {monthly}/monthly\n"
    assert tell("schedule", "ls", monthly, "--json").out == ""


def test_operators_look_into_the_internal_topic(monthly: str, tell: Call) -> None:
    assert monthly in tell("topic", "list").out and "~schedules" not in tell("topic", "list").out
    assert "~schedules" in tell("topic", "list", "--all").out
    ids = [one["id"] for one in tell("ls", "~schedules", "--tag", f"{monthly}/monthly", "--json").json]
    assert [id.startswith(f"{monthly}/monthly#") for id in ids] == [True]
    assert tell("topic", "drop", "~schedules", "--yes").code == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cron", "61 * * * *"), "the minute of cron '61 * * * *' must be 0 to 59"),
        ((), "a schedule needs a rule"),
        (("--every", "1h", "--zone", "Mars/Base"), "no time zone 'Mars/Base' is known here"),
        (("--every", "1h", "--start", "soon"), "--start 'soon' is no time"),
        (("--every", "1h", "--jitter", "-1s"), "--jitter must not be negative"),
        (("--every", "1h", "--payload", "x", "--payload-file", "y"), "give one of the two"),
        (("--every", "1h", "--header", "x"), "--header is name=value"),
        (("--every", "1h", "--overlap", "later"), "'later' is not one of"),
        (("--evry", "1h"), "Did you mean --every?"),
    ],
)
def test_a_mistake_is_named(topic: str, tell: Call, arguments: tuple[str, ...], said: str) -> None:
    done = tell("schedule", "create", topic, "x", *arguments)
    assert done.code == 2 and said in done.err
    assert tell("schedule", "ls", topic, "--json").out == ""


def test_a_crontab_becomes_schedules_once(topic: str, tell: Call, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_text("MAILTO=x\n0 9 * * 1-5 report.sh --daily\n*/5 * * * * check\n")
    asked = ("schedule", "import", topic, file, "--zone", "Europe/Berlin")
    dry = tell(*asked, "--dry-run")
    assert dry.code == 0 and tell("schedule", "ls", topic, "--json").out == ""
    head, *rows, _, last = dry.out.splitlines()
    assert head.split() == ["LINE", "NAME", "CRON", "NEXT", "RESULT", "COMMAND"]
    assert [row.split()[:2] for row in rows] == [["2", "report"], ["3", "check"]] and "to create" in rows[0]
    assert last == "read as a user crontab, its times in Europe/Berlin. Nothing was created: this was a dry run"
    assert (
        dry.err
        == "timeline: line 1: MAILTO is left out: nobody mails what commands print. The consumer that runs them can\n"
    )
    assert [one["result"] for one in tell(*asked, "--json").json] == ["created", "created"]
    assert [one["result"] for one in tell(*asked, "--json").json] == ["there already", "there already"]
    report, check = reversed(tell("schedule", "ls", topic, "--json").json)
    assert (report["cron"], report["zone"], report["payload"]) == (
        ["0 9 * * 1-5"],
        "Europe/Berlin",
        "report.sh --daily",
    )
    assert check["name"] == "check"


def test_a_line_more_in_a_crontab_moves_no_name(topic: str, tell: Call, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_text("@daily report\n@weekly report\n")
    asked = ("schedule", "import", topic, file, "--zone", "UTC", "--json")
    assert [one["name"] for one in tell(*asked).json] == ["report", "report-2"]
    file.write_text("@daily report\n@hourly report\n@weekly report\n")
    assert [(one["name"], one["result"]) for one in tell(*asked).json] == [
        ("report", "there already"), ("report-3", "created"), ("report-2", "there already"),
    ]  # fmt: skip
    file.write_text("0 1 * * * report\n@hourly report\n@weekly report\n@reboot start\n")
    done = tell(*asked)
    assert done.code == 1
    assert [(one["name"], one["result"]) for one in done.json] == [
        ("report", "refused"), ("report-3", "there already"), ("report-2", "there already"),
    ]  # fmt: skip
    assert "line 1: " in done.err and "'timeline schedule update' changes it" in done.err
    assert "line 4: @reboot is no time" in done.err


def test_a_line_that_no_schedule_can_have_is_refused_alone(topic: str, tell: Call, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_text(f"@daily good\n@daily long % {'x' * 9_000}\nRANDOM_DELAY=1500\n@daily late\n")
    done = tell("schedule", "import", topic, file, "--zone", "UTC", "--json")
    assert (done.code, [(one["name"], one["result"]) for one in done.json]) == (1, [("good", "created")])
    assert "line 2: headers take " in done.err and "line 4: jitter must be 0 to 1d" in done.err


def test_a_dry_run_of_a_crontab_needs_no_broker(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "crontab"
    file.write_text("@daily report\n")
    done = call("schedule", "import", "jobs", file, "--zone", "UTC", "--dry-run", "--address", "127.0.0.1:1")
    assert done.code == 0 and "report" in done.out
    assert done.err.startswith("timeline: what is there already is not known: UNAVAILABLE: ")
    done = call("schedule", "import", "jobs", file, "--zone", "UTC", "--address", "127.0.0.1:1")
    assert (done.code, done.out) == (3, "")


def test_what_is_no_crontab_is_refused(topic: str, tell: Call, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"@daily x\n@daily \xe4\n")
    done = tell("schedule", "import", topic, tmp_path / "latin")
    assert done.code == 2 and "line 2 of" in done.err and "is not UTF-8" in done.err
    done = tell("schedule", "import", topic, tmp_path / "absent")
    assert done.code == 2 and "No such file" in done.err
    (tmp_path / "empty").write_text("# nothing\n")
    assert "the crontab runs nothing" in tell("schedule", "import", topic, tmp_path / "empty", "--zone", "UTC").out
