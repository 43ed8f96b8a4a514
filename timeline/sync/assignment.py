"""Which broker deals which bucket: weighted rendezvous hashing over the healthy consumers that each broker hosts. Pure.

Each pair of bucket and broker has a score that depends on nothing else but the broker's weight, so that a bucket's
first choice changes only when a broker with a higher score comes, or its own goes: the least movement there can be.
Hashing alone deals as unevenly as dice do, though: at 64 buckets a broker, an eighth more or less is usual. So a broker
takes no more than `SLACK_PERCENT` beyond its share, those it scores best; what is left over goes to its next choice, as
students go to colleges (Gale and Shapley, 1962: there is one such outcome, whoever asks first). A broker that lies more
than `SLACK_PERCENT` below its share is then given what it scores best of those that have more than theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SLACK_PERCENT = 5
"""How far from its share a broker's number of buckets may lie, beyond rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The buckets of one topic. `brokers`: names in order; `owners`: for each bucket, the index of its broker; empty
    when there is no broker."""

    brokers: tuple[str, ...]
    owners: npt.NDArray[np.int64]
    _of: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def owner(self, bucket: int) -> str | None:
        """The broker that deals `bucket`; None exactly when there is none at all."""
        return self.brokers[self.owners[bucket]] if self.brokers else None

    def of(self, broker: str) -> tuple[int, ...]:
        """The buckets that `broker` deals, in order."""
        if broker not in self.brokers:
            return ()
        if broker not in self._of:
            mine = np.flatnonzero(self.owners == self.brokers.index(broker))
            self._of[broker] = tuple(mine.tolist())
        return self._of[broker]


def assign(topic_uid: int, buckets: int, weights: Mapping[str, int]) -> Assignment:
    """Deals `buckets` buckets of a topic out to the brokers that have a weight (healthy consumers) above 0. The same
    arguments give the same answer in every process."""
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
    """By bucket and broker: weight / -ln(u), u a hash of both in (0, 1) (Thaler and Ravishankar, 1998; the weighted
    form is Schindelhauer and Schomaker's, 2005)."""
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
    """For each bucket the broker of the highest score that keeps it, where each broker keeps the `most` it scores
    highest of all that come to it."""
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
    """Gives each broker that has less than its `least` what it misses least by score, from those with more than
    `enough`."""
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
