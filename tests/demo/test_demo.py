"""The demo itself: all of its processes, a real broker, a day of a few dozen flights; and how it ends when ended."""

from __future__ import annotations

import csv
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.servers.cassandra import CassandraServer
from tests.servers.cockroachdb import CockroachServer
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.process import Server
from tests.servers.redis import RedisServer
from tests.servers.redis_cluster import RedisClusterServer
from tests.services import require_service
from tests.storage_plugins.cockroach_stand_in import REAL
from timeline.demo.flights import COLUMNS, Flight
from timeline.demo.plan import HISTORY_SUFFIX
from timeline.demo.processes import ETCD, REDIS, missing

pytestmark = pytest.mark.processes
TIMELINE = (sys.executable, "-m", "timeline")


@pytest.fixture
def data(flights: list[Flight], tmp_path: Path) -> Path:
    """The small day as a file for --data."""
    path = tmp_path / "flights.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for flight in flights:
            delay = "" if flight.delay_min is None else flight.delay_min
            rows.writerow(
                (flight.id, flight.scheduled_ms, delay, flight.carrier, flight.origin, flight.dest, flight.tail)
            )
    return path


def environment(folder: Path) -> dict[str, str]:
    """This process's environment with temporary files in `folder`, and a variable that must not reach the broker."""
    return {**os.environ, "TMPDIR": str(folder), "TIMELINE_STORE": "nonsense://"}


def processes_of(folder: Path) -> list[int]:
    """Ids of processes that name `folder` in their command line, or in the environment, as the broker's store is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in words:
                found.append(int(entry.name))
    return found


def played(data: Path, folder: Path, *options: str, **variables: str) -> tuple[int, dict[str, object], str]:
    folder.mkdir()
    done = subprocess.run(
        [*TIMELINE, "demo", "--data", str(data), "--json", *options],
        capture_output=True, text=True, env={**environment(folder), **variables}, timeout=110,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("store", ["", pytest.param("memory://", marks=pytest.mark.prove)])
def test_a_day_goes_out_on_time(data: Path, flights: list[Flight], tmp_path: Path, store: str) -> None:
    folder = tmp_path / "temporary"
    code, told, said = played(data, folder, "--speed", "12000", "--store", store)
    assert (code, told["off"]) == (0, []), said
    cancelled = sum(flight.cancelled for flight in flights)
    assert told["put"] == len(flights)
    assert told["moved"] == sum(flight.late for flight in flights)
    assert told["cancelled"] == cancelled
    assert told["delivered"] == len(flights) - cancelled
    assert (told["early"], told["lost"], told["doubled"]) == (0, 0, 0)
    assert told["crashes"] == 4 and told["leases_back"] >= 4  # type: ignore[operator]
    assert told["webhooks"] > 0  # type: ignore[operator]
    assert told["inspected"] > 0  # type: ignore[operator]
    assert set(told["lateness_ms"]) == {"p50", "p99", "max"}  # type: ignore[call-overload]
    assert list(folder.iterdir()) == [] and processes_of(folder) == []


@pytest.mark.parametrize(
    "kind",
    [RedisServer, RedisClusterServer, PostgresqlServer, MysqlServer, CassandraServer, CockroachServer],
    ids=lambda kind: kind.name,
)
@pytest.mark.prove
def test_a_day_on_a_server(
    kind: type[Server], servers: Running, data: Path, flights: list[Flight], tmp_path: Path
) -> None:
    """Whatever keeps them, messages go out: never early, none lost, none doubled."""
    url, plugin = servers.url(kind), tmp_path / "plugin"
    if url.startswith("cockroachdb:") and REAL not in os.environ:
        url = f"standin{url.removeprefix('cockroachdb')}"
        stand_in_as_plugin(plugin)
    code, told, said = played(
        data, tmp_path / "temporary", "--speed", "12000", "--store", url, PYTHONPATH=f"{Path.cwd()}:{plugin}"
    )
    assert (code, told["off"]) == (0, []), said
    assert (told["put"], told["early"], told["lost"], told["doubled"]) == (len(flights), 0, 0, 0)


def stand_in_as_plugin(folder: Path) -> None:
    """A distribution in `folder` that brings CockroachDB's stand-in as `standin://`, for processes that get a URL."""
    about = folder / "standin-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[timeline.storage_plugins]\nstandin = standin:store\n", encoding="utf-8")
    (folder / "standin.py").write_text(
        "from tests.storage_plugins.cockroach_stand_in import StandInStore\n"
        "def store(url):\n"
        "    return StandInStore('cockroachdb' + url.removeprefix('standin'))\n",
        encoding="utf-8",
    )


def test_a_cluster_goes_on_without_the_broker_that_is_killed(data: Path, flights: list[Flight], tmp_path: Path) -> None:
    for service in ("etcd", "redis"):
        require_service(service)
    folder = tmp_path / "temporary"
    code, told, said = played(data, folder, "--speed", "6000", "--cluster")
    assert (code, told["off"]) == (0, []), said
    assert told["broker_killed"] == "broker-2" and told["put"] == len(flights) and told["webhooks"] > 0  # type: ignore[operator]
    assert (told["early"], told["lost"], told["doubled"]) == (0, 0, 0)
    assert list(folder.iterdir()) == [] and processes_of(folder) == []


def test_a_cluster_names_the_servers_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "apt-get install etcd-server redis-server;" in str(missing(ETCD, REDIS))
    assert str(missing(ETCD)).endswith("apt-get install etcd-server")


@pytest.mark.prove
def test_keep_leaves_everything_to_look_at(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    code, told, said = played(data, folder, "--speed", "20000", "--keep")
    assert code == 0, said
    kept = Path(str(told["folder"]))
    assert kept.parent == folder and str(kept) in said
    names = {path.name for path in kept.iterdir()}
    assert {"plan.json", "timeline.db", "broker.log", f"gate-1{HISTORY_SUFFIX}", f"feeder-1{HISTORY_SUFFIX}"} <= names


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.prove) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_ending_it_ends_all_of_its_processes(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    demo = subprocess.Popen(
        [*TIMELINE, "demo", "--data", str(data), "--speed", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "put" in line:  # the day has begun: every process is there
                break
        assert len(processes_of(folder)) >= 8
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130
    assert "Traceback" not in errors and errors.endswith("timeline: interrupted\n")
    assert processes_of(folder) == [] and list(folder.iterdir()) == []


@pytest.mark.prove
def test_the_console_stays_open_after_the_day_until_it_is_interrupted(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    demo = subprocess.Popen(
        [*TIMELINE, "demo", "--data", str(data), "--speed", "20000", "--console"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(folder),
    )  # fmt: skip
    try:
        assert demo.stdout is not None
        said = next(line for line in demo.stdout if "the console stays open at" in line)
        found = re.search(r"http://\S+/", said)
        assert found is not None, said
        assert "Overview" in httpx.get(found[0], timeout=60).text
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 0 and "Traceback" not in rest, rest
    assert processes_of(folder) == [] and list(folder.iterdir()) == []


@pytest.mark.prove
def test_a_broker_that_dies_ends_the_demo_with_its_last_words(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    demo = subprocess.Popen(
        [*TIMELINE, "demo", "--data", str(data), "--speed", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "put" in line:
                break
        (broker,) = [
            pid for pid in processes_of(folder) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(broker, signal.SIGKILL)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 4
    assert "the broker died with code -9" in errors and "Traceback" not in errors
    assert processes_of(folder) == []


@pytest.mark.parametrize(
    ("store", "code", "why"),
    [
        ("nonsense://", 2, "no storage plugin for 'nonsense://'"),
        ("sqlite:////nowhere/at/all/timeline.db", 4, "broker ended with code 4: timeline: "),
    ],
)
def test_a_store_that_cannot_be_had_is_said_at_once(
    data: Path, tmp_path: Path, store: str, code: int, why: str
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [*TIMELINE, "demo", "--data", str(data), "--store", store],
        capture_output=True, text=True, env=environment(folder), timeout=110,
    )  # fmt: skip
    assert done.returncode == code
    assert why in done.stderr and "Traceback" not in done.stderr
    assert list(folder.iterdir()) == [] and processes_of(folder) == []


@pytest.mark.prove
def test_nothing_survives_the_conductor(data: Path, tmp_path: Path) -> None:
    """A conductor that is killed cannot end anybody: they notice, and end by themselves."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    demo = subprocess.Popen(
        [*TIMELINE, "demo", "--data", str(data), "--speed", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(folder),
    )  # fmt: skip
    assert demo.stdout is not None
    for line in demo.stdout:
        if "put" in line:
            break
    children = [os.pidfd_open(pid) for pid in processes_of(folder) if pid != demo.pid]
    assert len(children) >= 8
    demo.kill()
    demo.communicate()
    for child in children:
        ended, _, _ = select.select([child], [], [], 30)
        os.close(child)
        assert ended
