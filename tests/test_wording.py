"""Settings and durations in the words that people type."""

from __future__ import annotations

import pytest

from timeline.config import parse_duration_ms
from timeline.model import SETTING_RANGES
from timeline.wording import above, nearest_zones, out_of_range, shown_duration, typed_name, typed_value, unknown_zone


def test_a_duration_is_shown_in_the_largest_unit_that_says_it_exactly() -> None:
    assert [shown_duration(ms) for ms in (0, 250, 30_000, 90_000, 43_200_000)] == ["0", "250ms", "30s", "90s", "12h"]


@pytest.mark.parametrize("ms", [0, 1, 999, 1_000, 61_000, 86_400_000, 316_224_000_000])
def test_what_is_shown_is_read_back(ms: int) -> None:
    assert parse_duration_ms(shown_duration(ms)) == ms


@pytest.mark.parametrize(
    ("setting", "value", "name", "typed"),
    [
        ("remember_ms", 2_592_000_000, "remember", "30d"),
        ("lease_ahead_ms", -1, "lease_ahead", "auto"),
        ("max_payload_bytes", 1_048_576, "max_payload_bytes", "1048576"),
        ("paused", True, "paused", "True"),
    ],
)
def test_a_setting_as_it_is_typed(setting: str, value: object, name: str, typed: str) -> None:
    assert (typed_name(setting), typed_value(setting, value)) == (name, typed)


def test_a_setting_out_of_its_range() -> None:
    low, high = SETTING_RANGES["lease_ahead_ms"]
    assert out_of_range("lease_ahead_ms", low, high, high + 1).startswith("lease_ahead must be auto, or 0 to ")
    assert out_of_range("lease_ms", 1, 43_200_000, 0) == "lease must be 1ms to 12h, not 0"
    assert out_of_range("lease_ms", 1, 43_200_000, "x") == "lease must be 1ms to 12h, not 'x'"
    assert out_of_range("buckets", 1, 4_096, 0) == "buckets must be a whole number from 1 to 4096, not 0"
    assert above("lease_ms", 60_000, "max_lease_ms", 30_000) == "lease 1m is above max_lease 30s: raise max_lease, too"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Berlin", "'Europe/Berlin'"),
        ("berlin", "'Europe/Berlin'"),
        ("Europe/Berlim", "'Europe/Berlin'"),
        ("europe/berlin", "'Europe/Berlin'"),
        ("Germany/Berlin", "'Europe/Berlin'"),
        ("New York", "'America/New_York'"),
        ("Amerika/New_York", "'America/New_York'"),
        ("Tokio", "'Asia/Tokyo'"),
        ("utc", "'UTC'"),
        ("Eastern", "'Canada/Eastern' or 'US/Eastern'"),
    ],
)
def test_an_unknown_zone_names_the_nearest_ones(name: str, meant: str) -> None:
    assert unknown_zone(name) == f"no time zone {name!r} is known here: did you mean {meant}?"


@pytest.mark.parametrize(
    "name", ["", "Mars", "Mars/Base", "../etc/passwd", "PST", "CEST", "GMT+1", "+01:00", "x" * 9999]
)
def test_a_zone_that_is_near_to_none_gets_an_example(name: str) -> None:
    assert nearest_zones(name[:80]) == ""
    assert "is known here: use a name like 'America/New_York' (if none is known, " in unknown_zone(name)
    assert len(unknown_zone(name)) < 250
