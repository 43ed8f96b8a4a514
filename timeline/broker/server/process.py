"""A broker's process: its event loop, its logs, and whether a port is free.

The loop is asyncio's own, with timers to the microsecond. asyncio waits in epoll, which counts in milliseconds, rounded
up. A timer of 0.3 ms then takes a whole one. With a due time in every millisecond nothing else wakes the loop sooner,
and half a millisecond of lateness comes from that alone. The older select(2) counts in microseconds, and may wait for
the one descriptor that epoll itself is.

Logs are one line per event, as text for people or JSON for machines, with fields (`extra=`) beside the sentence.
Secrets of tokens are cut out everywhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import select
import selectors
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from timeline.broker.server.tokens import without_secrets
from timeline.config import split_address
from timeline.wording import printable, printable_json

FD_SETSIZE = 1024
"""select(2) takes only descriptors below it."""
MS = 0.001

if sys.platform == "linux":

    class MicrosecondSelector(selectors.EpollSelector):
        """epoll that returns when the time is over, not up to a millisecond later."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Return events, or none after `timeout` seconds. A long wait ends a little sooner; asyncio then asks for
            the rest."""
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > 2 * MS:
                return super().select(timeout - MS)
            ready, _, _ = select.select((self.fileno(),), (), (), timeout)
            return super().select(0) if ready else []


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop for a broker's process: asyncio's own where timers are precise, or cannot be made so."""
    if sys.platform == "linux":
        selector = MicrosecondSelector()
        if selector.fileno() < FD_SETSIZE:
            return asyncio.SelectorEventLoop(selector)
        selector.close()
    return asyncio.new_event_loop()


_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


class JsonLines(logging.Formatter):
    """One JSON object per line: time (ISO 8601, UTC), level, logger, event, fields, and an error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return without_secrets(printable_json(json.dumps(line, default=str, ensure_ascii=False)))


class TextLines(logging.Formatter):
    """Lines for people: time, level, sentence, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        lines = [f"{time} {record.levelname.lower():7} {record.getMessage()}{fields}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        return without_secrets("\n".join(map(printable, lines)))


def _named(broker: str) -> Callable[[logging.LogRecord], bool]:
    def name(record: logging.LogRecord) -> bool:
        record.broker = getattr(record, "broker", broker)
        return True

    return name


def set_up_logs(level: str, format: str, broker: str = "") -> None:
    """Send the package's logs, and warnings of its libraries, to standard error. `format`: "json" or "text". `broker`:
    a field of each line, if several processes share one standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if broker:
        handler.addFilter(_named(broker))
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    for name, least in (("timeline", level.upper()), ("asyncio", "WARNING"), ("grpc", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False


def check_free(listen: str) -> None:
    """Raise OSError with the system's reason, its `filename` `listen`, if a process cannot listen there now. Port 0 is
    always free."""
    host, port = split_address(listen)
    try:
        kind, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind(address)
            asked.listen(1)
    except OSError as taken:
        raise OSError(taken.errno, taken.strerror, listen) from taken
