"""A frame of a kind that only a newer minor knows."""

from __future__ import annotations

from tests.wire.test_versions import built, credit_with_more
from timeline.wire import MINOR
from timeline.wire.generated import layout

UNKNOWN = built(len(layout.BODIES) + 1, MINOR + 1, credit_with_more)
