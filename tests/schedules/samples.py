"""Schedules for tests."""

from __future__ import annotations

from typing import Any

from timeline.schedules import Specification


def spec(**fields: Any) -> Specification:
    return Specification(**{"topic": "invoices", "name": "monthly", "cron": "0 6 1 * *"} | fields)


FULL = spec(
    cron=["0 6 1 * *", "0 7 * * 1"],
    every_ms=60_000,
    rrule="FREQ=DAILY",
    exclude=["2026-12-25"],
    start_ms=1_000,
    end_ms=90_000_000_000_000,
    count=7,
    zone="Europe/Berlin",
    gap="skip",
    fold="both",
    jitter_ms=5,
    catch_up="all",
    window_ms=86_400_000,
    overlap="queue",
    payload=b"\x00\xff{occurrence}",
    headers={"n": "{sequence}"},
    tag="spring",
    group="billing",
    expires_ms=9,
    paused=True,
)
