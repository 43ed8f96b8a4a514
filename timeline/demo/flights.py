"""The departures: a sample that ships with the package, or the year's file.

The data are New York City's scheduled departures of 2013 (nycflights13, CC0; see `data/README.md`). A day is New
York's: from midnight to midnight there, 23 or 25 hours long when the clocks change.
"""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from zoneinfo import ZoneInfo

from timeline.errors import Invalid

NEW_YORK = ZoneInfo("America/New_York")
SAMPLE = "departures.csv.gz"
DEFAULT_DAY = dt.date(2013, 3, 8)
"""A Friday with a snowstorm: of 979 departures 653 were late and 180 cancelled."""
COLUMNS = ("flight_id", "sched_dep_ms", "dep_delay_min", "carrier", "origin", "dest", "tailnum")
MINUTE_MS = 60_000
_CITIES = """
ABQ Albuquerque|ACK Nantucket|ALB Albany|ANC Anchorage|ATL Atlanta|AUS Austin|AVL Asheville|BDL Hartford|BGR Bangor
BHM Birmingham|BNA Nashville|BOS Boston|BQN Aguadilla|BTV Burlington|BUF Buffalo|BUR Burbank|BWI Baltimore|BZN Bozeman
CAE Columbia|CAK Akron|CHO Charlottesville|CHS Charleston|CLE Cleveland|CLT Charlotte|CMH Columbus|CRW Charleston WV
CVG Cincinnati|DAY Dayton|DCA Washington Reagan|DEN Denver|DFW Dallas|DSM Des Moines|DTW Detroit|EGE Eagle Vail
EYW Key West|FLL Fort Lauderdale|GRR Grand Rapids|GSO Greensboro|GSP Greenville|HDN Steamboat Springs|HNL Honolulu
HOU Houston Hobby|IAD Washington Dulles|IAH Houston|ILM Wilmington|IND Indianapolis|JAC Jackson Hole|JAX Jacksonville
LAS Las Vegas|LAX Los Angeles|LEX Lexington|LGA New York LaGuardia|LGB Long Beach|MCI Kansas City|MCO Orlando
MDW Chicago Midway|MEM Memphis|MHT Manchester|MIA Miami|MKE Milwaukee|MSN Madison|MSP Minneapolis|MSY New Orleans
MTJ Montrose|MVY Martha's Vineyard|MYR Myrtle Beach|OAK Oakland|OKC Oklahoma City|OMA Omaha|ORD Chicago O'Hare
ORF Norfolk|PBI West Palm Beach|PDX Portland|PHL Philadelphia|PHX Phoenix|PIT Pittsburgh|PSE Ponce|PSP Palm Springs
PVD Providence|PWM Portland ME|RDU Raleigh|RIC Richmond|ROC Rochester|RSW Fort Myers|SAN San Diego|SAT San Antonio
SAV Savannah|SBN South Bend|SDF Louisville|SEA Seattle|SFO San Francisco|SJC San Jose|SJU San Juan|SLC Salt Lake City
SMF Sacramento|SNA Santa Ana|SRQ Sarasota|STL St. Louis|STT St. Thomas|SYR Syracuse|TPA Tampa|TUL Tulsa
TVC Traverse City|TYS Knoxville|XNA Bentonville
"""
CITIES = {part[:3]: part[4:] for line in _CITIES.split("\n") for part in line.split("|") if part}
AIRLINES = {
    "9E": "Endeavor", "AA": "American", "AS": "Alaska", "B6": "JetBlue", "DL": "Delta", "EV": "ExpressJet",
    "F9": "Frontier", "FL": "AirTran", "HA": "Hawaiian", "MQ": "Envoy", "OO": "SkyWest", "UA": "United",
    "US": "US Airways", "VX": "Virgin America", "WN": "Southwest", "YV": "Mesa",
}  # fmt: skip


def city(code: str) -> str:
    """The city of an airport, or the code itself where none is known."""
    return CITIES.get(code, code)


@dataclass(frozen=True, slots=True)
class Flight:
    """One scheduled departure. `scheduled_ms`: UTC, as the airline planned it; `delay_min`: how late it left (negative:
    early), None when it was cancelled."""

    id: str
    scheduled_ms: int
    delay_min: int | None
    carrier: str
    origin: str
    dest: str
    tail: str

    @property
    def number(self) -> str:
        """As a board shows it: `UA 1545`."""
        name = self.id.partition("-")[0]
        return f"{self.carrier} {name[len(self.carrier) :]}" if name.startswith(self.carrier) else name

    @property
    def cancelled(self) -> bool:
        return self.delay_min is None

    @property
    def late(self) -> bool:
        """Whether it left after its scheduled time."""
        return self.delay_min is not None and self.delay_min > 0

    @property
    def leaves_ms(self) -> int:
        """When it goes out: delayed where it was late, else as scheduled (nobody leaves a passenger behind)."""
        return self.scheduled_ms + (self.delay_min or 0) * MINUTE_MS if self.late else self.scheduled_ms

    def payload(self) -> bytes:
        """What the message carries."""
        local = dt.datetime.fromtimestamp(self.scheduled_ms / 1000, NEW_YORK)
        facts = {
            "flight": self.number,
            "from": self.origin,
            "to": self.dest,
            "aircraft": self.tail,
            "scheduled": local.isoformat(timespec="minutes"),
        }
        return json.dumps(facts, separators=(",", ":")).encode()


def parse_day(text: str) -> dt.date:
    """The date written YYYY-MM-DD. Raises Invalid."""
    try:
        return dt.date.fromisoformat(text)
    except ValueError as bad:
        raise Invalid(f"a day is written YYYY-MM-DD, such as {DEFAULT_DAY}, not {text!r:.40}") from bad


def day_bounds(day: dt.date) -> tuple[int, int]:
    """First millisecond of New York's `day` and first one after it, UTC."""
    start, end = (dt.datetime.combine(each, dt.time(), NEW_YORK) for each in (day, day + dt.timedelta(days=1)))
    return int(start.timestamp() * 1000), int(end.timestamp() * 1000)


def flights_of(day: dt.date, data: str | Path | None = None) -> list[Flight]:
    """The departures of New York's `day` by scheduled time, out of the sample or the file `data` (the year's parquet,
    or CSV with the same columns). Raises Invalid with what to give when the day or the file cannot be had."""
    if data is None:
        flights = _read_csv(gzip.decompress(files("timeline.demo").joinpath("data", SAMPLE).read_bytes()), SAMPLE)
    else:
        flights = _read_file(Path(data), day)
    start_ms, end_ms = day_bounds(day)
    found = sorted(
        (flight for flight in flights if start_ms <= flight.scheduled_ms < end_ms),
        key=lambda flight: (flight.scheduled_ms, flight.id),
    )
    if not found:
        raise Invalid(_no_such_day(day, flights, data))
    return found


def days_of(flights: Iterable[Flight]) -> list[dt.date]:
    """New York's days on which these departures are scheduled."""
    return sorted({dt.datetime.fromtimestamp(flight.scheduled_ms / 1000, NEW_YORK).date() for flight in flights})


def _no_such_day(day: dt.date, flights: list[Flight], data: str | Path | None) -> str:
    if data is not None:
        return f"{data} has no departure on {day}; the data are of 2013-01-01 to 2013-12-31"
    days = ", ".join(str(each) for each in days_of(flights))
    return (
        f"{day} is not in the sample that ships with the package, which has {days}; "
        "for another day of 2013 give the year's file: --data flights_2013.parquet"
    )


def _read_file(path: Path, day: dt.date) -> list[Flight]:
    try:
        with path.open("rb") as opened:
            head = opened.read(4)
    except OSError as cannot:
        raise Invalid(f"--data {path} cannot be read: {cannot.strerror}") from cannot
    if head == b"PAR1":
        return _read_parquet(path, day)
    content = path.read_bytes()
    if head[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as bad:
            raise Invalid(f"--data {path} is a damaged gzip file: {bad}") from bad
    return _read_csv(content, str(path))


def _read_parquet(path: Path, day: dt.date) -> list[Flight]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise Invalid(
            f"reading {path} needs pyarrow, which is not installed: pip install 'timeline[parquet]' "
            "(the sample that ships with the package needs nothing)"
        ) from missing
    start_ms, end_ms = day_bounds(day)
    within = [("sched_dep_ms", ">=", start_ms), ("sched_dep_ms", "<", end_ms)]
    try:
        table = pq.read_table(path, columns=list(COLUMNS), filters=within)
    except (pa.ArrowException, OSError, KeyError) as bad:
        raise Invalid(f"--data {path} is not the flights' parquet ({', '.join(COLUMNS)}): {bad}") from bad
    return [_flight(row, f"{path}, row {at}") for at, row in enumerate(table.to_pylist())]


def _read_csv(content: bytes, name: str) -> list[Flight]:
    try:
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
        missing = set(COLUMNS) - set(rows.fieldnames or ())
        if missing:
            raise Invalid(f"{name} is neither parquet nor CSV with the columns {', '.join(COLUMNS)}")
        return [_flight(row, f"{name}, row {at}") for at, row in enumerate(rows)]
    except (UnicodeDecodeError, csv.Error) as bad:
        raise Invalid(f"{name} is neither parquet nor CSV with the columns {', '.join(COLUMNS)}: {bad}") from bad


def _flight(row: dict[str, object], where: str) -> Flight:
    """A row of either file. Raises Invalid."""
    try:
        said = row["dep_delay_min"]
        delay = None if said in (None, "") else float(str(said))
        return Flight(
            id=_text(row["flight_id"]),
            scheduled_ms=int(str(row["sched_dep_ms"])),
            delay_min=None if delay is None or math.isnan(delay) else int(delay),
            carrier=_text(row["carrier"]),
            origin=_text(row["origin"]),
            dest=_text(row["dest"]),
            tail="" if row["tailnum"] is None else str(row["tailnum"]),
        )
    except (ValueError, OverflowError) as bad:
        raise Invalid(f"{where} is no departure: {bad}") from bad


def _text(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= 255:
        raise ValueError(f"a text of 1 to 255 bytes is needed, not {value!r:.40}")
    return value
