"""The checks of the conformance suite for Redis Cluster, Cassandra and CockroachDB's stand-in. `make test` leaves out
the longest ones."""

from __future__ import annotations

import pytest

from timeline.storage_plugins.conformance import CHECKS

LONGEST = {
    "topics_at_their_limits",
    "brokers_racing",
    "brokers_racing_where_ids_are_remembered",
    "racing_leases",
    "scan_walks_in_order",
    "rules_on_a_plain_topic",
    "rules_on_a_topic_that_remembers",
    "rules_with_backoff_and_few_deliveries",
    "racing_everything",
    "large_batches",
    "large_mixed_batches",
}
LEFT = [pytest.param(name, marks=pytest.mark.prove) if name in LONGEST else name for name in CHECKS]
"""All names, the longest ones marked."""

assert set(CHECKS) >= LONGEST
