"""The thread behind `connect_sync`: it winds down once, whoever closes it meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

import timeline
from timeline.driver.blocking.calls import Background


@pytest.mark.slow
def test_closing_while_it_winds_down_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raised SystemExit ended the loop; to be told to stop in the midst of that broke it off."""
    background = Background()
    begun, cancelled, go_on = threading.Event(), threading.Event(), threading.Event()
    never = asyncio.Event()  # held here: a loop holds its tasks weakly

    async def lingers() -> None:
        try:
            begun.set()
            await never.wait()
        finally:
            cancelled.set()
            while not go_on.is_set():
                await asyncio.sleep(0)

    async def exits() -> None:
        raise SystemExit(3)

    background.start(lingers())
    begun.wait()
    with pytest.raises((timeline.Closed, SystemExit)):
        background.run(exits())
    cancelled.wait()
    thread = background._thread
    assert thread is not None
    joined: list[int | None] = []
    join = threading.Thread.join

    def joining(self: threading.Thread, timeout: float | None = None) -> None:
        joined.append(self.ident)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", joining)
    closing = threading.Thread(target=background.close)
    closing.start()
    while thread.ident not in joined:
        pass
    go_on.set()
    closing.join()
    assert not thread.is_alive()
    background.close()
