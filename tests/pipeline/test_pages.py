"""The pages that jobs write open in a real browser, whole, without asking anybody for anything."""

from __future__ import annotations

import datetime as dt
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.services import require_service
from timeline.pipeline.jobs.audit import PROMISES, Audit, Gap, audit_page
from timeline.pipeline.jobs.forecast import LoadForecast, LoadStep, forecast_page

HOUR_MS = 3_600_000
START_MS = 1_795_000_000_000 // HOUR_MS * HOUR_MS


def audited() -> Audit:
    """An audit with something in every part of it."""
    at = dt.datetime.fromtimestamp(START_MS / 1000, dt.UTC)
    percentiles = {"deliveries": 50_000, "least": 0, "at": [1, 2, 4, 9, 61]}
    hours = [
        {"of": f"2026-11-18 {hour:02d}:00", **percentiles, "at": [1, 2, 3 + hour % 5, 6 + hour % 7, 61]}
        for hour in range(24)
    ]
    return Audit(
        since_ms=START_MS,
        until_ms=START_MS + 24 * HOUR_MS,
        messages={"put": 1_200_000, "delivered": 1_191_745, "acked": 1_191_744, "moved": 128_432, "cancelled": 8_255},
        events={"put": 1_200_000, "delivered": 1_191_810, "acked": 1_191_744},
        lateness={
            "topic": [{"of": "departures <1>", **percentiles}],
            "hour": hours,
            "time": [row | {"of": f"{row['of']}:00"} for row in hours],
            "consumer": [{"of": "gate-0", **percentiles}],
        },
        histogram=[{"bucket": bucket, "count": 1_000_000 >> (bucket * 2)} for bucket in range(8)],
        redelivered={"ran_out": 40, "released": 20, "relet": 5},
        late={"no_consumer": 61, "store_slow": 4},
        broken={"lost": 1},
        examples=[
            {"promise": "lost", "topic": "departures", "id": "UA1545-<b>"}
            | {"put": at, "last": at, "ended": "put", "delivered": 0}
        ],
        open=1,
        pending=0,
        gaps=[Gap("b2", START_MS, START_MS + 5_000, 1_234)],
        unended=["b3"],
        stories={
            "UA1545": [
                {"time": at, "topic": "a<b", "kind": "put", "version": 1, "due": at}
                | {"lateness": None, "consumer": None, "cause": None},
                {"time": at, "topic": "a<b", "kind": "released", "version": 2, "due": at}
                | {"lateness": 61, "consumer": "gate-<0>", "cause": "<script>alert('&')</script>"},
            ]
        },
    )  # fmt: skip


def ahead() -> LoadForecast:
    steps = [
        LoadStep(
            START_MS + at * HOUR_MS,
            400 * (at % 24 > 4),
            500.0 * (at % 24 > 4) + 3_000 * (at == 30),
            300.0,
            5_200.0 * (at == 30) + 700,
            40,
        )
        for at in range(72)
    ]  # fmt: skip
    return LoadForecast("departures", START_MS, HOUR_MS, steps, overdue=3, weeks=4, per_consumer_s=20.0, measured=True)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    [lambda: audit_page(audited(), "s3://x/<journal>"), lambda: forecast_page(ahead())],
    ids=["audit", "forecast"],
)
def test_a_page_is_drawn_by_a_browser_that_reaches_nobody(written: Callable[[], str], tmp_path: Path) -> None:
    require_service("chromium")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(written(), encoding="utf-8")
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1000,2400", f"--screenshot={picture}", f"file://{page}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert picture.exists(), done.stderr
    with Image.open(picture) as drawn:
        assert drawn.size == (1000, 2400)
        colours = {colour: count for count, colour in drawn.convert("RGB").getcolors(1 << 24) or ()}
    assert colours.get((47, 111, 159), 0) > 200, "bars or lines in the plots' own colour"
    assert colours[(255, 255, 255)] > 1_000_000


def test_a_page_is_one_file_without_scripts_and_what_is_in_it_is_text() -> None:
    for text in (audit_page(audited(), "s3://x/<journal>"), forecast_page(ahead())):
        assert text.startswith("<!doctype html>")
        assert "<script" not in text and "src=" not in text and "href=" not in text and "url(" not in text
    text = audit_page(audited(), "s3://x/<journal>")
    assert (
        "gate-&lt;0&gt;" in text
        and "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text
        and "a&lt;b" in text
    )
    assert "&lt;journal&gt;" in text and "UA1545-&lt;b&gt;" in text and "departures &lt;1&gt;" in text
    assert "Broken for 1 messages: S8 no loss" in text and "1,234 events of broker b2 are missing" in text
    assert set(PROMISES) == {"early", "twice", "resurrected", "lost", "unexplained", "reclaimed"}


def test_a_forecast_names_its_spike_and_the_consumers_that_it_takes() -> None:
    told = ahead()
    assert [step.start_ms for step in told.spikes] == [START_MS + 30 * HOUR_MS]
    assert told.consumers == 1
    for step in told.steps[:24]:
        step.expected = 3_000 + 10 * (step.start_ms // HOUR_MS % 7)
    assert told.spikes == [], "a plateau is no spike"
    told.steps[3].expected = 9_000
    assert told.spikes == [told.steps[3]]
    told.per_consumer_s = 0.5
    assert told.consumers == 4, "5,900 an hour at the band's upper end are 1.64 a second"
