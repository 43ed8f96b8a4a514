"""Brokers of a cluster with one mistake each, everything else being the real thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.simulation.planted_brokers import instead
from timeline.broker.cluster import BrokerPeers
from timeline.broker.dispatch.dealer import Dealer
from timeline.broker.dispatch.leased_batch import LeasedBatch, Token, tokens
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.clock import Clock, StepVerdict
from timeline.model import Rows
from timeline.sync.view import View


def leaves_a_bucket_to_nobody() -> Any:
    """The last of each broker's buckets is nobody's."""
    buckets = View.buckets

    def fewer(view: View, topic_uid: int, many: int) -> Sequence[int] | None:
        mine = buckets(view, topic_uid, many)
        return mine[:-1] if mine else mine

    return instead(View, "buckets", fewer)


def tells_nobody() -> Any:
    """A broker that keeps to itself what comes due in others' buckets."""
    return instead(BrokerPeers, "tell", lambda peers, member, topic_uid, due_ms: None)


def shares_a_token() -> Any:
    """Whoever takes a consumer's id over gets what it holds under the very tokens that it has."""

    async def as_it_is(dealer: Dealer, rows: Rows, consumer: ConnectedConsumer, peer: str) -> set[Token]:
        again = np.ones(len(rows), dtype=np.bool_)
        batch = LeasedBatch(rows, rows.scheduled_ms, again, dealer._clock.now_ms())
        consumer.spend(len(batch), int(batch.sizes.sum()))
        dealer.give(consumer, batch)
        return tokens(rows.ids, rows.birth, rows.version)

    return instead(Dealer, "_regrant", as_it_is)


def follows_every_step() -> Any:
    """A clock that goes wherever the wall clock goes, at once."""
    observe = Clock.observe
    return instead(Clock, "observe", lambda clock, judge=None: observe(clock, lambda step_ms: StepVerdict.CONFIRMED))
