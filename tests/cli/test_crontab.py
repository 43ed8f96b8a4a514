"""Crontabs: which lines become schedules, how these are called, and what is said of the other lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeline.cli.schedules.crontab import (
    Crontab,
    CrontabStyle,
    base_name,
    machine_zone,
    named_entries,
    read_crontab,
)
from timeline.errors import Invalid

BERLIN = "Europe/Berlin"


def read(text: str, style: CrontabStyle | None = None, users: tuple[str, ...] = ("root",)) -> Crontab:
    return read_crontab(text, BERLIN, style, users)


def test_each_line_becomes_an_entry_in_the_zone_that_holds_for_it() -> None:
    found = read(
        "# m h dom mon dow command\n\n0 9 * * 1-5 report --daily\nCRON_TZ=America/New_York\n"
        "  */15\t* * * *   check\t-x\n@Hourly rotate\nCRON_TZ = 'Asia/Tokyo'\n-0 1 * * SUN quiet\n"
    )
    assert [(one.line, one.cron, one.zone, one.command) for one in found.entries] == [
        (3, "0 9 * * 1-5", BERLIN, "report --daily"),
        (5, "*/15 * * * *", "America/New_York", "check\t-x"),
        (6, "@Hourly", "America/New_York", "rotate"),
        (8, "0 1 * * SUN", "Asia/Tokyo", "quiet"),
    ]
    assert found.notes == [] and found.style is CrontabStyle.USER


@pytest.mark.parametrize(
    ("rest", "command", "stdin"),
    [
        ("date +\\%F", "date +%F", None),
        ("mail ops%Hello%world", "mail ops", "Hello\nworld\n"),
        ("cat%", "cat", ""),
        ("echo 100\\% %50\\% off", "echo 100%", "50% off\n"),
        ("cat%one%", "cat", "one\n"),
    ],
)
def test_a_percent_sign_begins_standard_input(rest: str, command: str, stdin: str | None) -> None:
    (entry,) = read(f"@daily {rest}\n").entries
    assert (entry.command, entry.stdin) == (command, stdin)
    assert entry.headers == ({} if stdin is None else {"stdin": stdin})


def test_a_system_crontab_has_users() -> None:
    text = "SHELL=/bin/sh\n17 * * * * root cd / && run-parts --report /etc/cron.hourly\n@daily root backup\n"
    found = read(text)
    assert found.style is CrontabStyle.SYSTEM
    assert [(one.user, one.command) for one in found.entries] == [
        ("root", "cd / && run-parts --report /etc/cron.hourly"),
        ("root", "backup"),
    ]
    assert found.entries[0].headers == {"user": "root"}
    # One line that names no user makes it a user's: there `root backup` is a command.
    assert [one.command for one in read(text + "@daily tar -c x\n").entries][1] == "root backup"
    assert [one.user for one in read("@daily app run\n", CrontabStyle.SYSTEM).entries] == ["app"]
    (note,) = read("@daily alone\n", CrontabStyle.SYSTEM).notes
    assert note.refused and "--style user" in note.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("@reboot start", "@reboot is no time"),
        ("61 * * * * x", "the minute of cron '61 * * * *' must be 0 to 59"),
        ("* * * * *", "there is no command after the rule"),
        ("@daily", "there is no command after the rule"),
        ("every day", "this is no line of a crontab"),
        ("H H * * * x", "H in 'H H * * *' is Jenkins' own"),
        ("0~30 4 * * * x", "drawn again by each cron"),
        ("@600 x", "--every 600s"),
        ("@fortnightly x", "'@fortnightly'"),
        ("0 0 31 2 * x", "a day of the month that none of its months has"),
        ("0 0 * * * a\x1bb", "characters that no terminal shows"),
    ],
)
def test_a_line_that_cannot_be_taken_is_refused_alone(line: str, said: str) -> None:
    found = read(f"@daily before\n{line}\n@daily after\n")
    assert [one.command for one in found.entries] == ["before", "after"]
    (note,) = found.notes
    assert (note.line, note.refused, found.refused) == (2, True, 1)
    assert said in note.text


def test_settings_are_taken_or_named() -> None:
    found = read('MAILTO=""\nTZ=Asia/Tokyo\nPATH=/bin:/usr/bin\nRANDOM_DELAY=45\n@daily x\n')
    assert [(note.line, note.refused) for note in found.notes] == [(1, False), (2, False), (3, False)]
    assert ["MAILTO" in found.notes[0].text, "--zone" in found.notes[1].text, "PATH" in found.notes[2].text] == [
        True
    ] * 3
    assert (found.entries[0].jitter_ms, found.entries[0].zone, found.refused) == (45 * 60_000, BERLIN, 0)


def test_a_zone_that_does_not_exist_is_refused_by_the_lines_it_holds_for() -> None:
    found = read("CRON_TZ=Mars/Base\n@daily x\n")
    assert found.entries == [] and "no time zone 'Mars/Base'" in found.notes[0].text and found.refused == 1


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/local/bin/report.sh --daily", "report"),
        ("cd /srv && ./manage.py clearsessions >/dev/null 2>&1", "manage-clearsessions"),
        ("test -x /usr/sbin/anacron || ( cd / && run-parts --report /etc/cron.daily )", "run-parts-cron.daily"),
        ("[ -x /usr/bin/certbot ] && perl -e 'sleep int(rand(43200))' && certbot -q renew", "certbot-renew"),
        ("nice -n 10 /opt/backup.sh --full /data", "backup-data"),
        ("flock -n /tmp/x.lock python3 -m invoices.send --month", "invoices.send"),
        ("sudo -u www-data php artisan schedule:run", "artisan-schedule-run"),
        ("timeout 10m /bin/sync-all", "sync-all"),
        ("A=1 B=2 rsync x y", "rsync-x"),
        ("(", "command"),
        ("东京", "command"),
        ("x" * 200, "x" * 60),
    ],
)
def test_names_come_from_commands(command: str, name: str) -> None:
    assert base_name(command) == name


def test_equal_names_get_numbers_and_go_round_taken_ones() -> None:
    entries = read("@daily report\n@hourly report\n@weekly report\n").entries
    assert [name for name, _ in named_entries(entries, ["report-2"])] == ["report", "report-3", "report-4"]


def test_the_machine_says_its_zone(tmp_path: Path) -> None:
    assert machine_zone({"TZ": ":Europe/Berlin"}, tmp_path) == BERLIN
    assert machine_zone({"TZ": "/usr/share/zoneinfo/Asia/Tokyo"}, tmp_path) == "Asia/Tokyo"
    assert machine_zone({}, tmp_path) == "UTC"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").write_bytes(b"TZif2")
    with pytest.raises(Invalid, match="give --zone"):
        machine_zone({}, tmp_path)
    (tmp_path / "etc/timezone").write_text("America/New_York\n")
    assert machine_zone({"TZ": "EST5EDT,M3.2.0,M11.1.0"}, tmp_path) == "America/New_York"
    (tmp_path / "etc/localtime").unlink()
    (tmp_path / "etc/localtime").symlink_to("../usr/share/zoneinfo/Asia/Kolkata")
    assert machine_zone({}, tmp_path) == "Asia/Kolkata"
