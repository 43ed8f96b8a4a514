"""The departures: the sample, files of others, and what is said of those that cannot be had."""

from __future__ import annotations

import datetime as dt
import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from timeline.demo.flights import (
    AIRLINES,
    CITIES,
    COLUMNS,
    DEFAULT_DAY,
    MINUTE_MS,
    Flight,
    day_bounds,
    flights_of,
    parse_day,
)
from timeline.errors import Invalid

HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("day", "departures", "late", "cancelled"),
    [
        ("2013-03-08", 979, 653, 180),
        ("2013-03-10", 908, 337, 5),
        ("2013-07-23", 997, 645, 95),
        ("2013-11-03", 902, 225, 2),
    ],
)
def test_sample_days(day: str, departures: int, late: int, cancelled: int) -> None:
    flights = flights_of(parse_day(day))
    found = len(flights), sum(flight.late for flight in flights), sum(flight.cancelled for flight in flights)
    assert found == (departures, late, cancelled)
    assert len({flight.id for flight in flights}) == departures
    assert [flight.scheduled_ms for flight in flights] == sorted(flight.scheduled_ms for flight in flights)
    assert {flight.dest for flight in flights} <= set(CITIES)
    assert {flight.carrier for flight in flights} <= set(AIRLINES)


def test_a_day_is_new_yorks() -> None:
    hours = {
        day: (end - start) / 3_600_000
        for day in ("2013-03-08", "2013-03-10", "2013-11-03")
        for start, end in [day_bounds(parse_day(day))]
    }
    assert hours == {"2013-03-08": 24, "2013-03-10": 23, "2013-11-03": 25}


def test_a_flight_says_what_a_board_needs() -> None:
    flight = Flight("B6725-JFK-1357037100000", 1_357_037_100_000, 7, "B6", "JFK", "BQN", "N804JB")
    assert flight.number == "B6 725"
    assert flight.leaves_ms == flight.scheduled_ms + 7 * MINUTE_MS
    assert b'"scheduled":"2013-01-01T05:45-05:00"' in flight.payload()
    early = Flight("X", 1_000, -5, "B6", "JFK", "BQN", "")
    assert (early.late, early.leaves_ms, early.number) == (False, 1_000, "X")
    cancelled = Flight("X", 1_000, None, "B6", "JFK", "BQN", "")
    assert cancelled.cancelled and not cancelled.late


@pytest.mark.parametrize("text", ["", "yesterday", "2013-13-01", "08.03.2013", "2013-02-30"])
def test_no_days(text: str) -> None:
    with pytest.raises(Invalid, match="YYYY-MM-DD"):
        parse_day(text)


def test_a_day_outside_the_sample_says_what_to_give() -> None:
    with pytest.raises(Invalid, match=r"not in the sample.*2013-03-08.*--data flights_2013.parquet"):
        flights_of(dt.date(2013, 5, 5))


def test_a_csv_file_of_ones_own(tmp_path: Path) -> None:
    start_ms, _ = day_bounds(DEFAULT_DAY)
    row = f"UA1-EWR-1,{start_ms},12,UA,EWR,ORD,"
    for name, content in {
        "a.csv": f"{HEADER}\n{row}\n".encode(),
        "b.gz": gzip.compress(f"{HEADER}\n{row}".encode()),
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert flights_of(DEFAULT_DAY, path) == [Flight("UA1-EWR-1", start_ms, 12, "UA", "EWR", "ORD", "")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "neither parquet nor CSV"),
        (b"a,b\n1,2\n", "neither parquet nor CSV"),
        (b"\xff\xfe\x00", "neither parquet nor CSV"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
        (b"PAR1nonsense", "not the flights' parquet"),
        (f"{HEADER}\nX,soon,1,UA,EWR,ORD,\n".encode(), "row 0 is no departure"),
        (f"{HEADER}\n,1362718800000,1,UA,EWR,ORD,\n".encode(), "row 0 is no departure"),
        (f"{HEADER}\nX,1362718800000,late,UA,EWR,ORD,\n".encode(), "row 0 is no departure"),
        (f"{HEADER}\nX,1362718800000,inf,UA,EWR,ORD,\n".encode(), "row 0 is no departure"),
        (f"{HEADER}\nX,0,1,UA,EWR,ORD,\n".encode(), "has no departure on 2013-03-08"),
    ],
)
def test_files_that_are_no_flights(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(Invalid) as refused:
        flights_of(DEFAULT_DAY, path)
    assert said in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        flights_of(DEFAULT_DAY, tmp_path / "none")
    with pytest.raises(Invalid, match="cannot be read: Is a directory"):
        flights_of(DEFAULT_DAY, tmp_path)


@pytest.mark.slow
def test_a_parquet_file_gives_the_same_day_as_the_sample(tmp_path: Path) -> None:
    flights = flights_of(DEFAULT_DAY) + flights_of(dt.date(2013, 7, 23))
    columns = {
        "flight_id": [flight.id for flight in flights],
        "sched_dep_ms": [flight.scheduled_ms for flight in flights],
        "dep_delay_min": [None if flight.delay_min is None else float(flight.delay_min) for flight in flights],
        "carrier": [flight.carrier for flight in flights],
        "origin": [flight.origin for flight in flights],
        "dest": [flight.dest for flight in flights],
        "tailnum": [flight.tail or None for flight in flights],
    }
    path = tmp_path / "year.parquet"
    pq.write_table(pa.table(columns), path)
    assert flights_of(DEFAULT_DAY, path) == flights_of(DEFAULT_DAY)


@pytest.mark.slow
def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "year.parquet"
    path.write_bytes(b"PAR1")
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from timeline.__main__ import main\n"
        f"sys.argv = ['timeline', 'demo', '--data', {str(path)!r}]\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'timeline-scheduler[parquet]'" in done.stderr
    assert "Traceback" not in done.stderr
