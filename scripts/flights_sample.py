"""Write the sample days of the demo from the year's file (see timeline/demo/data/README.md).

.venv/bin/python scripts/flights_sample.py flights_2013.parquet 2013-03-08 2013-03-10 2013-07-23 2013-11-03
"""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import sys
from pathlib import Path

from timeline.demo.flights import COLUMNS, SAMPLE, flights_of

TARGET = Path(__file__).resolve().parent.parent / "timeline" / "demo" / "data" / SAMPLE


def main(year: str, *days: str) -> int:
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(COLUMNS)
    for day in sorted(days):
        for flight in flights_of(dt.date.fromisoformat(day), year):
            delay = "" if flight.delay_min is None else flight.delay_min
            rows.writerow(
                (flight.id, flight.scheduled_ms, delay, flight.carrier, flight.origin, flight.dest, flight.tail)
            )
    # No time stamp in the file, so that the same days make the same bytes.
    TARGET.write_bytes(gzip.compress(written.getvalue().encode(), mtime=0))
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
