"""Recurring schedules by the million: any table becomes schedules, and they go with a backup of their topic."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import timeline
from tests.pipeline.conftest import Serving
from timeline.errors import Exists, Invalid
from timeline.pipeline.jobs.backup import backup, restore, verify
from timeline.pipeline.jobs.schedules import ScheduleLoad, load_schedules
from timeline.schedules import Specification

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

START = datetime(2031, 5, 6, 7, tzinfo=UTC)


def schedules(address: str, topic: str) -> dict[str, Specification]:
    with timeline.connect_sync(address) as tl:
        return {one.name: one.specification for one in tl.schedules(topic)}


@pytest.fixture
def recurring(make_topic: Callable[..., str]) -> str:
    return make_topic(remember="3h")


@pytest.mark.prove
def test_every_field_may_be_a_column(spark: Any, broker: Serving, recurring: str) -> None:
    rows = spark.createDataFrame(
        [
            ("all", ["0 9 * * 1-5", "0 12 * * 6"], timedelta(minutes=90), "FREQ=DAILY", ["2031-12-25"], START,
             START + timedelta(days=400), 500, "Europe/Berlin", "skip", "both", 90.5, "all", "30m", "queue",
             bytearray(b"\xff{occurrence}"), {"kind": "report"}, "spring", "ops", "2h", True),
            ("few", ["@daily"], *[None] * 19),
        ],
        "name string, cron array<string>, every interval day to second, rrule string, exclude array<string>, "
        "start timestamp, `end` timestamp, count int, zone string, gap string, fold string, jitter double, "
        "catch_up string, window string, overlap string, payload binary, headers map<string,string>, tag string, "
        "`group` string, expires string, paused boolean",
    )  # fmt: skip
    asked = ScheduleLoad(broker.address, recurring)
    found = load_schedules(spark, rows, asked)
    assert asdict(found) == {
        "rows": 2, "created": 2, "there": 0, "replaced": 0, "rejected": 0, "reasons": {}, "ignored": [],
        "dry_run": False,
    }  # fmt: skip
    start_ms = int(START.timestamp() * 1000)
    assert schedules(broker.address, recurring) == {
        "all": Specification(
            recurring, "all", ("0 9 * * 1-5", "0 12 * * 6"), 5_400_000, ("FREQ=DAILY",), ("2031-12-25",), start_ms,
            start_ms + 400 * 86_400_000, 500, "Europe/Berlin", "skip", "both", 90_500, "all", 1_800_000, "queue",
            b"\xff{occurrence}", {"kind": "report"}, "spring", "ops", 7_200_000, True,
        ),  # type: ignore[arg-type]
        "few": Specification(recurring, "few", ("@daily",)),
    }  # fmt: skip
    assert (load_schedules(spark, rows, asked).there, load_schedules(spark, rows, asked).created) == (2, 0)


def test_expressions_name_columns_of_any_table(spark: Any, broker: Serving, recurring: str) -> None:
    table = spark.createDataFrame([(7, "Asia/Tokyo"), (8, "UTC")], "id int, time_zone string")
    found = load_schedules(
        spark,
        table,
        ScheduleLoad(broker.address, recurring, where="id < 9"),
        {
            "name": "concat('tenant-', id)",
            "cron": "'0 6 1 * *'",
            "zone": "time_zone",
            "payload": "to_json(struct(*))",
        },
    )
    assert (found.created, found.ignored) == (2, [])
    said = schedules(broker.address, recurring)["tenant-7"]
    assert said.zone == "Asia/Tokyo" and json.loads(said.payload) == {"id": 7, "time_zone": "Asia/Tokyo"}


@pytest.mark.prove
def test_all_rows_are_checked_before_any_is_created(
    spark: Any, broker: Serving, recurring: str, tmp_path: Path
) -> None:
    with timeline.connect_sync(broker.address) as tl:
        tl.schedule(recurring, "theirs", cron="@daily")
    rows = spark.createDataFrame(
        [
            ("good", "@hourly", "a"),
            ("good", "@hourly", "a"),
            ("wrong", "61 * * * *", "a"),
            ("twice", "@hourly", "a"),
            ("twice", "@hourly", "b"),
            ("theirs", "@hourly", "a"),
            (None, "@hourly", "a"),
            ("a/b", "@hourly", "a"),
        ],
        "name string, cron string, payload string",
    )
    dry = load_schedules(spark, rows, ScheduleLoad(broker.address, recurring, dry_run=True))
    assert (dry.rows, dry.created, dry.rejected, dry.dry_run) == (8, 1, 6, True)
    told = " ".join(dry.reasons)
    for part in ("'61 * * * *'", "another row has the same name", "--if-exists replace", "name is 1 to 100 letters"):
        assert part in told
    assert dry.reasons["another row has the same name, and says something else"] == 2
    with pytest.raises(Invalid, match=r"6 of 8 rows make no schedule, more than the 5 allowed: .*--rejects URL"):
        load_schedules(spark, rows, ScheduleLoad(broker.address, recurring, max_rejects=5))
    assert list(schedules(broker.address, recurring)) == ["theirs"]

    rejects = tmp_path / "rejects"
    asked = ScheduleLoad(broker.address, recurring, max_rejects=6, rejects=f"file://{rejects}")
    found = load_schedules(spark, rows, asked)
    assert (found.created, found.rejected) == (1, 6)
    kept = [row for path in rejects.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted(row["name"] or "" for row in kept) == ["", "a/b", "theirs", "twice", "twice", "wrong"]
    assert all(row["reason"] for row in kept)
    assert schedules(broker.address, recurring)["theirs"].cron == ("@daily",)

    replaced = load_schedules(
        spark,
        rows.where("name = 'theirs'"),
        ScheduleLoad(broker.address, recurring, if_exists="replace"),
    )
    assert (replaced.replaced, replaced.rejected) == (1, 0)
    assert schedules(broker.address, recurring)["theirs"].cron == ("@hourly",)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id int", "a schedule needs a name"),
        ("name string", "a schedule needs a rule"),
        ("name string, cron string, count string", r"column 'count' must be a whole number, not string: say --column"),
        ("name string, every boolean", "column 'every' must be a string such as '15m', a number of seconds, or an"),
        ("name string, cron string, start string", "column 'start' must be a timestamp, not string"),
        ("name string, cron string, start timestamp_ntz", "column 'start' must be a timestamp, not timestamp_ntz"),
        ("name string, cron string, headers string", "column 'headers' must be a map<string,string>, not string"),
    ],
)
def test_a_column_of_another_type_is_refused(
    spark: Any, broker: Serving, recurring: str, columns: str, said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        load_schedules(spark, spark.createDataFrame([], columns), ScheduleLoad(broker.address, recurring))


def test_columns_that_are_no_field_are_named(spark: Any, broker: Serving, recurring: str) -> None:
    rows = spark.createDataFrame([("a", "@daily", "x")], "name string, cron string, catchup string")
    assert load_schedules(spark, rows, ScheduleLoad(broker.address, recurring)).ignored == ["catchup"]
    with pytest.raises(Invalid, match="a schedule has no field 'catchup'"):
        load_schedules(spark, rows, ScheduleLoad(broker.address, recurring), {"catchup": "'all'"})


def furnished(address: str, topic: str) -> None:
    with timeline.connect_sync(address) as tl:
        tl.schedule(topic, "reports", cron="0 9 * * 1-5", zone="Europe/Berlin", payload=b"\xff", headers={"a": "b"})
        tl.schedule(topic, "often", every="15m", paused=True, tag="spring", start=START)
        tl.producer(topic).produce(b"x", id="plain", at=START)


def test_a_backup_has_schedules_and_a_restore_creates_them(
    spark: Any, broker: Serving, recurring: str, tmp_path: Path
) -> None:
    furnished(broker.address, recurring)
    url = f"file://{tmp_path}/backup"
    manifest = backup(spark, broker.address, recurring, url, chunks=2)
    assert manifest.schedules == 2 and manifest.as_json()["schedules_checksum"]
    saved = json.loads((tmp_path / "backup" / "schedules.json").read_text())["schedules"]
    assert [one["specification"]["name"] for one in saved] == ["often", "reports"]
    assert saved[0]["revision"] == 1 and "position_ms" in saved[0]["state"]

    other = f"{recurring}-restored"
    dry = restore(spark, broker.address, url, other, dry_run=True)
    assert (dry.made, dry.put, dry.schedules.created) == (True, 1, ["often", "reports"])
    with timeline.connect_sync(broker.address) as tl:
        assert other not in {topic.name for topic in tl.topics()}

    done = restore(spark, broker.address, url, other)
    assert (done.put, done.schedules.counts()) == (1, {"created": 2, "there": 0, "replaced": 0, "kept": 0})
    ours, theirs = schedules(broker.address, recurring), schedules(broker.address, other)
    assert {name: one.to_json() | {"topic": recurring} for name, one in theirs.items()} == {
        name: one.to_json() for name, one in ours.items()
    }
    compared = verify(spark, broker.address, url, other)
    assert compared.well and (compared.same, compared.schedules_same) == (1, 2)
    again = restore(spark, broker.address, url, other)
    assert (again.there, again.schedules.counts()) == (1, {"created": 0, "there": 2, "replaced": 0, "kept": 0})
    with timeline.connect_sync(broker.address) as tl, tl.producer(other) as p:
        p.move("plain", in_="1h")
        p.produce(b"x", in_="1h", id="stranger")
    compared = verify(spark, broker.address, url, other)
    assert (compared.differing, compared.extra, compared.well) == (1, 1, False)
    assert compared.examples == {"plain": "scheduled", "stranger": "extra"}


@pytest.mark.prove
def test_a_schedule_that_differs_is_refused_by_name_unless_told(
    spark: Any, broker: Serving, recurring: str, tmp_path: Path
) -> None:
    furnished(broker.address, recurring)
    url = f"file://{tmp_path}/backup"
    backup(spark, broker.address, recurring, url, chunks=1)
    with timeline.connect_sync(broker.address) as tl:
        changed, gone = tl.get_schedule(recurring, "reports"), tl.get_schedule(recurring, "often")
        assert changed is not None and gone is not None
        changed.update(cron="0 10 * * *")
        gone.delete()
        tl.schedule(recurring, "new", cron="@daily")
    compared = verify(spark, broker.address, url)
    assert not compared.well
    assert (compared.schedules_missing, compared.schedules_differing, compared.schedules_extra) == (1, 1, 1)
    assert compared.examples == {
        "schedule often": "missing", "schedule reports": "differing", "schedule new": "extra",
    }  # fmt: skip
    assert verify(spark, broker.address, url, schedules="skip").well

    with pytest.raises(Invalid, match=r"1 schedules of .* differ from those of the backup: 'reports'\. .*--schedules"):
        restore(spark, broker.address, url)
    assert "often" not in schedules(broker.address, recurring), "nothing is created before all are checked"
    assert restore(spark, broker.address, url, schedules="skip").schedules.counts()["created"] == 0
    kept = restore(spark, broker.address, url, schedules="keep").schedules
    assert (kept.created, kept.kept) == (["often"], ["reports"])
    assert schedules(broker.address, recurring)["reports"].cron == ("0 10 * * *",)
    replaced = restore(spark, broker.address, url, schedules="replace").schedules
    assert (replaced.there, replaced.replaced) == (["often"], ["reports"])
    assert schedules(broker.address, recurring)["reports"].cron == ("0 9 * * 1-5",)
    with timeline.connect_sync(broker.address) as tl, pytest.raises(Exists):
        tl.schedule(recurring, "reports", cron="0 10 * * *")


@pytest.mark.prove
def test_what_a_restored_schedule_has_produced_is_no_other_message(
    spark: Any, broker: Serving, recurring: str, tmp_path: Path
) -> None:
    with timeline.connect_sync(broker.address) as tl:
        tl.schedule(recurring, "paused", every="1s", paused=True)
    url = f"file://{tmp_path}/backup"
    backup(spark, broker.address, recurring, url, chunks=1)
    other = f"{recurring}-live"
    restore(spark, broker.address, url, other)
    with timeline.connect_sync(broker.address) as tl:
        one = tl.get_schedule(other, "paused")
        assert one is not None
        made = one.trigger()
        tl.producer(other).produce(b"x", id="stranger@2031-05-06T07:00:00Z", at=START)
    compared = verify(spark, broker.address, url, other)
    assert (compared.produced, compared.extra, list(compared.examples)) == (1, 1, ["stranger@2031-05-06T07:00:00Z"])
    assert made.id.startswith("paused@")
    with pytest.raises(Invalid, match="messages that are not of this backup, such as 'stranger@"):
        restore(spark, broker.address, url, other)


def test_schedules_that_were_changed_in_the_backup_are_not_restored(
    spark: Any, broker: Serving, recurring: str, tmp_path: Path
) -> None:
    furnished(broker.address, recurring)
    url = f"file://{tmp_path}/backup"
    backup(spark, broker.address, recurring, url, chunks=1)
    file = tmp_path / "backup" / "schedules.json"
    told = file.read_text()
    for spoilt in (told.replace("0 9 * * 1-5", "0 9 * * *"), '{"schedules": []}', "[]"):
        file.write_text(spoilt)
        with pytest.raises(Invalid, match=r"schedules\.json of .* is not what its manifest says"):
            restore(spark, broker.address, url, f"{recurring}-other")
    file.unlink()
    with pytest.raises(Invalid, match=r"schedules\.json of .* is not what its manifest says"):
        restore(spark, broker.address, url, f"{recurring}-other")


def test_a_backup_of_before_has_no_schedules(spark: Any, broker: Serving, recurring: str, tmp_path: Path) -> None:
    furnished(broker.address, recurring)
    url = f"file://{tmp_path}/backup"
    backup(spark, broker.address, recurring, url, chunks=1)
    file = tmp_path / "backup" / "manifest.json"
    told = json.loads(file.read_text())
    del told["schedules"], told["schedules_checksum"]
    file.write_text(json.dumps(told))
    (tmp_path / "backup" / "schedules.json").unlink()
    assert restore(spark, broker.address, url, f"{recurring}-before").schedules.counts()["created"] == 0


@pytest.mark.prove
def test_the_commands(broker: Serving, recurring: str, tmp_path: Path, require_service: Callable[[str], None]) -> None:
    require_service("spark")
    tenants, backed_up = tmp_path / "tenants.csv", f"file://{tmp_path}/backup"
    tenants.write_text("id,zone,plan\n7,Asia/Tokyo,a\n8,Atlantis,b\n")
    table = (str(tenants), recurring, "--format", "csv", "--option", "header=true")
    columns = ("--column", "name=concat('tenant-', id)", "--column", "cron='@monthly'", "--column", "zone=zone")
    dry = called(broker, "load-schedules", *table, *columns, "--dry-run")
    assert dry.returncode == 1 and "no time zone 'Atlantis' is known here" in dry.stdout, dry.stdout + dry.stderr
    assert f"nothing was created on {recurring}: --dry-run" in dry.stdout
    due = ("--due", "if(id = 7, timestamp'2031-01-01', null)", "--payload", "plan")
    dry = called(broker, "load", *table, "--id", "id", *due, "--dry-run")
    assert dry.returncode == 1 and "cannot be produced" in dry.stdout, dry.stdout + dry.stderr
    done = called(broker, "load-schedules", *table, *columns, "--where", "id = 7", "--json")
    assert done.returncode == 0, done.stderr
    assert {name: json.loads(done.stdout)[name] for name in ("created", "rejected")} == {"created": 1, "rejected": 0}
    assert list(schedules(broker.address, recurring)) == ["tenant-7"]

    assert json.loads(called(broker, "backup", recurring, backed_up, "--json").stdout)["schedules"] == 1
    dry = called(broker, "restore", backed_up, "--topic", f"{recurring}-other", "--dry-run")
    assert dry.returncode == 0 and "tenant-7  created" in dry.stdout, dry.stdout + dry.stderr
    assert f"nothing was put on {recurring}-other: --dry-run" in dry.stdout


def called(broker: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "timeline",
        "pipeline",
        *words,
        "--address",
        broker.address,
        "--master",
        "local[1]",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)
