"""A client for the plain threads of Spark's Python workers: one event loop in a thread, with concurrent calls."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from timeline.clock import Clock
from timeline.config import parse_switch
from timeline.credentials import Credentials, credentials_of
from timeline.driver.blocking.calls import Background, iterate
from timeline.driver.client import Timeline
from timeline.errors import Closed, Forbidden, Invalid, NotFound
from timeline.model import Status, Topic

T = TypeVar("T")
ASK_MS = 10_000
"""Default timeout of a call, for jobs and their planning."""
_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?!SQLSTATE)[\w.]+(: |$)")
_CALLING, _CAUSE = "An error occurred while calling", "Caused by: "
IDENTITY = ("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE", "TOKEN")
"""Variables of the environment, without TIMELINE_."""


class SparkConnection:
    """A client at `addresses`, with the credentials of `identity`. Use it with `with`. `timeout_ms`: of a call; 0:
    `ASK_MS`. Raise Invalid for wrong addresses or credentials."""

    def __init__(self, addresses: str, timeout_ms: int = 0) -> None:
        self.client = Timeline(addresses, f"{timeout_ms or ASK_MS}ms", credentials=identity())
        self._background = Background(in_loop=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close."""
        try:
            self._background.run(self.client.aclose())
        except Closed:
            pass  # closed before
        finally:
            self._background.close()

    def run(self, asked: Coroutine[Any, Any, T]) -> T:
        """Run `asked` to its end."""
        return self._background.run(asked)

    def start(self, asked: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `asked` in the loop's thread."""
        return self._background.start(asked)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Iterate an asynchronous generator."""
        return iterate(self._background, source)

    def topic(self, name: str) -> Topic:
        """Return the topic's record. Raise NotFound, which lists the topics, or Unavailable."""
        topics = self.run(self.client.topics())
        for topic in topics:
            if topic.name == name:
                return topic
        there = ", ".join(sorted(topic.name for topic in topics)[:20]) or "none"
        raise NotFound(f"there is no topic {name!r}. Create it first (timeline topic create). There are: {there}")

    def broker_now_ms(self) -> int:
        """Return the time by a broker's clock. Raise Unavailable."""
        return round(Clock().now_ms() + self.run(self.client.ping()).offset_ms)

    def check_put(self, topic: str, group: str) -> None:
        """Raise Forbidden unless we may put on `topic` for `group`. Raise Unavailable or Unknown too.

        This cancels an id that does not exist. It takes the same right, topic and group, and changes nothing."""
        (answer,) = self.run(self.client.producer(topic, group).cancel_many([uuid.uuid4().hex]))
        if answer.status is Status.FORBIDDEN:
            raise Forbidden(
                f"{answer.detail}. Producing needs this right. Name a group of the token (--group NAME), or use another"
                " token"
            )


def identity() -> Credentials:
    """Return the credentials for brokers, from the variables of client commands. Raise Invalid.

    Variables reach each of Spark's Python workers. Options would be shown on Spark's pages, and a token must not be."""
    tls, ca, cert, key, file, token = (os.environ.get(f"TIMELINE_{name}") or None for name in IDENTITY)
    try:
        encrypted = (parse_switch(tls) or None) if tls else None
        return credentials_of(encrypted, ca, cert, key, Path(file) if file else token)
    except Invalid as bad:
        raise Invalid(f"{bad.reason} (TIMELINE_{', TIMELINE_'.join(IDENTITY)})") from bad


def first_line(failed: BaseException) -> str:
    """Return the cause of a failure, out of Spark's long report."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    if not lines:
        return type(failed).__name__
    first, trace, _ = lines[0].partition(_TRACE)
    if trace:  # of a Python worker: its exception stands at the end
        raised = [line for line in lines[1:] if _RAISED.match(line)]
        return first + (raised[-1] if raised else lines[-1])
    if first.startswith(_CALLING):  # by the bridge to Java, whose first line names the call
        causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
        return causes[-1] if causes else lines[min(1, len(lines) - 1)].removeprefix(": ")
    return lines[0]
