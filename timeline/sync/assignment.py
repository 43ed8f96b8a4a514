"""Which broker dispatches which bucket: weighted rendezvous hashing over the healthy consumers of each broker. Pure.

Each pair of bucket and broker has a score that depends only on the two and on the broker's weight. So a bucket's first
choice changes only if a broker with a higher score comes, or its own goes: the least possible movement. Hashing alone
is uneven: at 64 buckets per broker, an eighth more or less is usual. So a broker takes at most `SLACK_PERCENT` beyond
its share, those it scores best. The others go to their next choice, as students go to colleges (Gale and Shapley, 1962:
the outcome does not depend on the order). A broker that is more than `SLACK_PERCENT` below its share then gets, from
brokers above theirs, the buckets that it scores best.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SLACK_PERCENT = 5
"""How far a broker's number of buckets may be from its share, beyond rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The buckets of one topic. `brokers`: names in order; `owners`: for each bucket, the index of its broker; empty
    when there is no broker."""

    brokers: tuple[str, ...]
    owners: npt.NDArray[np.int64]
    _of: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def owner(self, bucket: int) -> str | None:
        """Return the broker that dispatches `bucket`; None if there is no broker."""
        return self.brokers[self.owners[bucket]] if self.brokers else None

    def of(self, broker: str) -> tuple[int, ...]:
        """Return the buckets that `broker` dispatches, in order."""
        if broker not in self.brokers:
            return ()
        if broker not in self._of:
            mine = np.flatnonzero(self.owners == self.brokers.index(broker))
            self._of[broker] = tuple(mine.tolist())
        return self._of[broker]


def assign(topic_uid: int, buckets: int, weights: Mapping[str, int]) -> Assignment:
    """Assign a topic's buckets to the brokers with a weight (healthy consumers) above 0. The same arguments give the
    same answer in every process."""
    brokers = tuple(sorted(name for name, weight in weights.items() if weight > 0))
    if len(brokers) < 2:
        return Assignment(brokers, np.zeros(buckets if brokers else 0, dtype=np.int64))
    weight = np.array([weights[name] for name in brokers], dtype=np.int64)
    scores = _scores(topic_uid, buckets, brokers, weight)
    # In whole numbers, so that a share of 64 is never one of 63.999….
    share, total = weight * buckets, int(weight.sum())
    most = np.maximum(-(-share // total), share * (100 + SLACK_PERCENT) // (100 * total))
    least = np.minimum(share // total, -(-share * (100 - SLACK_PERCENT) // (100 * total)))
    owners = _capped(scores, most)
    _fill(owners, scores, least, share // total)
    return Assignment(brokers, owners)


def _scores(
    topic_uid: int, buckets: int, brokers: tuple[str, ...], weight: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return, by bucket and broker, weight / -ln(u), where u is a hash of both in (0, 1). Sources: Thaler and
    Ravishankar, 1998; Schindelhauer and Schomaker, 2005, for the weighted form."""
    named = np.array([_hash(name.encode()) for name in brokers], dtype=np.uint64)
    numbered = _mixed(
        np.arange(buckets, dtype=np.uint64) + np.uint64(_hash(topic_uid.to_bytes(16, "big", signed=True)))
    )
    mixed = _mixed(numbered[:, None] ^ named[None, :])
    uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    scores: npt.NDArray[np.float64] = weight[None, :] / -np.log(uniform)
    return scores


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): each bit of it depends on all of the value's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _capped(scores: npt.NDArray[np.float64], most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each bucket the broker of the highest score that keeps it. Each broker keeps, of all that come to it,
    the `most` it scores highest."""
    buckets = len(scores)
    choices = np.argsort(-scores, axis=1, kind="stable")
    tried = np.zeros(buckets, dtype=np.int64)
    every = np.arange(buckets)
    while True:
        owners: npt.NDArray[np.int64] = choices[every, tried]
        over = np.flatnonzero(np.bincount(owners, minlength=len(most)) > most)
        if not len(over):
            return owners
        for broker in over.tolist():
            came = np.flatnonzero(owners == broker)
            ranked = came[np.argsort(-scores[came, broker], kind="stable")]
            tried[ranked[most[broker] :]] += 1


def _fill(
    owners: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    least: npt.NDArray[np.int64],
    enough: npt.NDArray[np.int64],
) -> None:
    """Give each broker below its `least` the buckets that lose least by score, from brokers with more than `enough`."""
    counts = np.bincount(owners, minlength=len(least))
    for poor in np.flatnonzero(counts < least).tolist():
        yours = scores[np.arange(len(owners)), owners]
        for bucket in np.argsort(yours / scores[:, poor], kind="stable").tolist():
            if counts[poor] >= least[poor]:
                break
            rich = owners[bucket]
            if rich != poor and counts[rich] > enough[rich]:
                owners[bucket] = poor
                counts[rich] -= 1
                counts[poor] += 1
