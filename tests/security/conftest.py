"""Certificates and brokers that ask who calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.security.certificates import DAY, NOW, Authority, Pair
from tests.security.guarded import Guarded, Tokens


@dataclass(frozen=True, slots=True)
class Papers:
    """What the tests of a session share: an authority that brokers and clients trust, and one that nobody does."""

    ours: Authority
    theirs: Authority
    broker: Pair
    client: Pair
    stranger: Pair
    expired: Pair


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    return Papers(
        ours,
        theirs,
        ours.issue("broker", "localhost", "127.0.0.1"),
        ours.issue("client"),
        theirs.issue("stranger", "localhost"),
        ours.issue("expired", "localhost", starts=NOW - 9 * DAY, ends=NOW - DAY),
    )


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
async def guarded(tokens: Tokens) -> AsyncIterator[Guarded]:
    """A broker that asks for tokens; the names resolve on this machine alone, so that no encryption is needed."""
    broker = Guarded(tokens)
    await broker.start()
    yield broker
    await broker.stop()
