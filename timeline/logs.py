"""Logs of a process that serves: one line per event, as text for people or JSON for machines.

Fields (`extra=`) stand beside the sentence. Secrets of tokens are cut out everywhere.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from timeline.wording import printable, printable_json

_SECRET = re.compile(r"(timeline_[0-9a-f]{12}_)[0-9a-f]{8,}")


def without_secrets(text: str) -> str:
    """Return `text` without the secret part of any token. Logs pass through here."""
    return _SECRET.sub(r"\1…", text) if "timeline_" in text else text


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
    levels = {"timeline": level.upper(), "asyncio": "WARNING", "grpc": "WARNING", "uvicorn": "ERROR"}
    for name, least in levels.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False
