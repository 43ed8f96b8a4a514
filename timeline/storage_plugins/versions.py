"""Versions of a store's schema, and how one becomes the next while brokers of both are at work.

A step has two halves. It *expands* when the first broker of the new version opens the store. Its additions have
defaults, so brokers of the old version go on beside it. It *contracts* when its operator says so, once no broker of the
old version is left (`timeline store migrate --contract`). Then parts that only the old version needed are removed. So
two neighbouring versions share a store, and the new one can be rolled back until then.

    version      1 ──expand──▶ 2                  ──contract──▶ 2      ──expand──▶ 3
    may use it   1             1, 2 (neighbours)                2                  2, 3
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from timeline.columns import ColumnBatch
from timeline.model import ROW_DTYPES
from timeline.storage_plugins.errors import StoreRefused

E = TypeVar("E")
"""The argument of a step's halves: in the SQL family, what runs a statement."""


@dataclass(frozen=True)
class Step(Generic[E]):
    """The way from one version to the next. Both halves run in the transaction that notes the new version, or can be
    run again if a database has no such transactions: a column or an index that is there counts as added, and one that
    is not there as removed. A released step never changes."""

    expand: Callable[[E], None]
    contract: Callable[[E], None]


@dataclass(frozen=True, slots=True)
class Versions:
    """`version`: up to which a schema is expanded. `oldest`: the oldest version that may still use it."""

    version: int
    oldest: int

    @classmethod
    def of(cls, version: str | bytes, oldest: str | bytes | None) -> Versions:
        """Return the versions that a store has noted. A store without `oldest` was never only expanded. Raise
        ValueError."""
        reached = int(version)
        return cls(reached, reached if oldest is None else int(oldest))


def migrate(work: E, found: Versions, steps: Sequence[Step[E]], *, contract: bool = False) -> Versions:
    """Take a schema forward to the version that `steps` lead to, step i from version i + 1 to i + 2. Return the
    versions reached, for the caller to note.

    `contract`: also remove what only the version before needed. Without it, a schema is contracted only for versions
    two behind, which never share a store with this one. Raise StoreRefused for a schema that this version cannot use.
    Raise it also for `contract` when a newer version uses the schema.
    """
    known = 1 + len(steps)
    if not 1 <= found.oldest <= found.version or found.oldest > known:
        raise StoreRefused(
            f"the store's schema has version {found.version}, which {found.oldest} and newer can use; this Timeline "
            f"knows versions 1 to {known}: run the Timeline that wrote it, or a newer one"
        )
    if found.version > known:
        if contract:
            raise StoreRefused(
                f"the store's schema has version {found.version}, and this Timeline knows {known}: contract it with "
                "the newer Timeline, once no broker of this version is left"
            )
        return found
    version, oldest = found.version, found.oldest
    while version < known:
        oldest = _contracted(work, oldest, version, steps)
        steps[version - 1].expand(work)
        version += 1
    if contract:
        oldest = _contracted(work, oldest, version, steps)
    return Versions(version, oldest)


def _contracted(work: E, oldest: int, version: int, steps: Sequence[Step[E]]) -> int:
    """Remove what only versions before `version` needed."""
    for step in steps[oldest - 1 : version - 1]:
        step.contract(work)
    return version


def noted(known: Mapping[str, str], version: str = "schema_version", oldest: str = "oldest_version") -> Versions:
    """Return the versions that a store notes under these names. Raise KeyError or ValueError for a damaged note."""
    return Versions.of(known[version], known.get(oldest))


class LaterNumbers:
    """The numeric columns of `Rows` that a packed layout was made without: eight bytes each, in the order of `Rows`.

    A store keeps them at the end of what it packs, or before a part whose length it knows. What an earlier version
    packed has fewer of them: the others read as 0. What a later version packed has more, which are kept.
    """

    def __init__(self, known: Collection[str]) -> None:
        """`known`: the columns that the layout has a place for."""
        self.names = tuple(name for name in ROW_DTYPES if name not in known)
        self._dtype = np.dtype([(name, "<u8" if ROW_DTYPES[name] is np.uint64 else "<i8") for name in self.names])

    def pack(self, puts: ColumnBatch) -> list[bytes]:
        """Return them as each put has them."""
        if not self.names:
            return [b""] * len(puts)
        numbers = np.zeros(len(puts), dtype=self._dtype)
        for name in self.names:
            numbers[name] = getattr(puts, name, 0)
        packed: list[bytes] = numbers.view(f"V{self._dtype.itemsize}").tolist()
        return packed

    def columns(self, packed: Sequence[bytes]) -> dict[str, Any]:
        """Return the columns of what was packed."""
        if not self.names:
            return {}
        size = self._dtype.itemsize
        numbers = np.frombuffer(b"".join([one[:size].ljust(size, b"\0") for one in packed]), dtype=self._dtype)
        return {name: numbers[name].astype(ROW_DTYPES[name]) for name in self.names}
