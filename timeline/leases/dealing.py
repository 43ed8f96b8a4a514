"""Round-robin over consumers by credit: which of n messages goes to which grant. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from timeline.columns import Int64, UInt32


class Granted(Protocol):
    """The part of a grant that dealing needs. `contract.Grant` has it."""

    @property
    def count(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def alone(self) -> bool: ...


def deal(grants: Sequence[Granted], sizes: Int64) -> UInt32:
    """Deals messages of `sizes` bytes, in order, one to each grant in turn; a grant that is used up is passed over.

    Answers the grant's index for each message that could be dealt: the first k messages, k ≤ n. Dealing stops at the
    first message for which no grant has bytes left, so that nothing overtakes it. A grant without room for one message
    is passed over for that one, and may take a smaller one in a later turn; among grants that were never passed over
    counts differ by at most one. A message above a grant's `max_bytes` goes to it only first, where it is `alone`, and
    is then all that it gets.
    """
    wanted = min(len(sizes), sum(grant.count for grant in grants))
    if wanted == 0:
        return np.zeros(0, dtype=np.uint32)
    sizes = sizes[:wanted]
    if len(grants) == 1 and int(sizes.sum()) <= grants[0].max_bytes:
        return np.zeros(wanted, dtype=np.uint32)
    turns = turns_of(grants, wanted)
    spent = np.bincount(turns, weights=sizes, minlength=len(grants))
    if all(spent[index] <= grant.max_bytes for index, grant in enumerate(grants)):
        return turns
    return _deal_by_bytes(grants, sizes)


def turns_of(grants: Sequence[Granted], wanted: int) -> UInt32:
    """The order of turns when only counts limit: grant g's k-th turn is in round k; rounds run by grant index."""
    counts = np.fromiter((min(grant.count, wanted) for grant in grants), dtype=np.int64, count=len(grants))
    whose = np.repeat(np.arange(len(grants), dtype=np.uint32), counts)
    rounds = np.arange(len(whose), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return whose[np.lexsort((whose, rounds))][:wanted]


def _deal_by_bytes(grants: Sequence[Granted], sizes: Int64) -> UInt32:
    """The same one by one, where bytes run out on the way."""
    left = [grant.count for grant in grants]
    room = [grant.max_bytes for grant in grants]
    alone = [grant.alone for grant in grants]
    dealt: list[int] = []
    turn = 0
    for size in sizes.tolist():
        for step in range(len(grants)):
            at = (turn + step) % len(grants)
            if left[at] and (size <= room[at] or alone[at]):
                break
        else:
            break
        left[at] -= 1
        room[at] -= size  # below 0 after an oversize message: nothing more fits, not even an empty one
        alone[at] = False
        dealt.append(at)
        turn = (at + 1) % len(grants)
    return np.array(dealt, dtype=np.uint32)
