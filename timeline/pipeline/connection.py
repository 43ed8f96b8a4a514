"""A client for the plain threads of Spark's Python workers: one event loop in a thread, calls that may run beside each
other, and the questions that planning asks."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from timeline.config import parse_switch
from timeline.credentials import Credentials, credentials_of
from timeline.driver.blocking.calls import Background, iterate
from timeline.driver.client import Timeline
from timeline.errors import Closed, Forbidden, Invalid, NotFound
from timeline.model import Status, Topic

T = TypeVar("T")
ASK_MS = 10_000
"""Who asks for a job that nobody answers hears so after this long."""
_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?!SQLSTATE)[\w.]+(: |$)")
_CALLING, _CAUSE = "An error occurred while calling", "Caused by: "
IDENTITY = ("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE", "TOKEN")
"""The variables are these behind TIMELINE_."""


class SparkConnection:
    """A client at `addresses` whose calls wait `timeout_ms`, `ASK_MS` when it is 0, as whom the process's variables say
    (`identity`). Use it with `with`. Raises Invalid."""

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
        """Flushes and closes."""
        try:
            self._background.run(self.client.aclose())
        except Closed:
            pass  # closed before
        finally:
            self._background.close()

    def run(self, asked: Coroutine[Any, Any, T]) -> T:
        """Runs `asked` to its end."""
        return self._background.run(asked)

    def start(self, asked: Coroutine[Any, Any, T]) -> Future[T]:
        """Has `asked` run beside this thread."""
        return self._background.start(asked)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Goes through an asynchronous generator."""
        return iterate(self._background, source)

    def topic(self, name: str) -> Topic:
        """The topic's record. Raises NotFound with the topics there are, Unavailable when nobody answers."""
        topics = self.run(self.client.topics())
        for topic in topics:
            if topic.name == name:
                return topic
        there = ", ".join(sorted(topic.name for topic in topics)[:20]) or "none"
        raise NotFound(f"there is no topic {name!r}: create it first (timeline topic create); there are: {there}")

    def check_put(self, topic: str, group: str) -> None:
        """Whether we may put on `topic` for `group`: asked by taking off a message that nobody has put, which takes the
        same right, topic and group, and changes nothing. Raises Forbidden, Unavailable, Unknown."""
        (answer,) = self.run(self.client.producer(topic, group).cancel_many([uuid.uuid4().hex]))
        if answer.status is Status.FORBIDDEN:
            raise Forbidden(
                f"{answer.detail}. To put takes the same: name a group that the token is for (--group NAME), or show "
                "another token"
            )


def identity() -> Credentials:
    """Who we are to brokers and whom we trust: the variables that client commands take, which reach each of Spark's
    Python workers. SourceOptions of a job are shown on Spark's pages; a token must not be. Raises Invalid."""
    tls, ca, cert, key, file, token = (os.environ.get(f"TIMELINE_{name}") or None for name in IDENTITY)
    try:
        encrypted = (parse_switch(tls) or None) if tls else None
        return credentials_of(encrypted, ca, cert, key, Path(file) if file else token)
    except Invalid as bad:
        raise Invalid(f"{bad.reason} (TIMELINE_{', TIMELINE_'.join(IDENTITY)})") from bad


def first_line(failed: BaseException) -> str:
    """What went wrong, out of the pages that Spark makes of it."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    if not lines:
        return type(failed).__name__
    first, trace, _ = lines[0].partition(_TRACE)
    if trace:  # of a Python worker: what was raised stands at the end
        raised = [line for line in lines[1:] if _RAISED.match(line)]
        return first + (raised[-1] if raised else lines[-1])
    if first.startswith(_CALLING):  # the bridge to Java, which says what was called
        causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
        return causes[-1] if causes else lines[min(1, len(lines) - 1)].removeprefix(": ")
    return lines[0]
