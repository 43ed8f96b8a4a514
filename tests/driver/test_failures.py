"""Handlers that fail in ways that nobody foresees: their messages go back, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import timeline
from tests.driver.test_handlers import _run_until
from timeline import Backoff, Retry


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (lambda: Retry(in_=float("nan")), "Retry: "),
        (lambda: Retry(in_="1s", at=0), "Retry: "),
        (lambda: Retry(in_="36000d"), "horizon"),
        (_Mute, "_Mute, which cannot say why"),
    ],
)
async def test_a_retry_that_cannot_be_and_an_error_without_words_are_failures_like_any_other(
    tl: timeline.Timeline, raised: Callable[[], Exception], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    done = asyncio.Event()

    async def handler(d: timeline.Delivery) -> None:
        if d.deliveries == 1:
            raise raised()
        done.set()

    async with tl.producer("t") as p, tl.consumer("t", id="w", lease="1h") as c:
        await p.produce(b"", in_=0)
        async with asyncio.timeout(20):  # of an hour's lease
            await _run_until(c, done, handler, concurrency=1, backoff=Backoff(first=0))
        assert c.stats.settle_errors == 0
    assert done.is_set() and said in caplog.text
