"""Structured logs: one line an event, as text for people or JSON for machines; what is beside the sentence is kept as
fields (`extra=`). What would be secret in a token is cut out, wherever it stands."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from timeline.broker.server.tokens import without_secrets
from timeline.wording import printable, printable_json

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


class JsonLines(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, event, the fields, and the error if there is one."""

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
    """The same for people: time, level, sentence, fields as name=value."""

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


def set_up(level: str, format: str, broker: str = "") -> None:
    """Sends the package's logs to standard error, and what it stands on has to warn of. `format`: "json" or "text".
    `broker`: a field of each line, where several write to one standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if broker:
        handler.addFilter(_named(broker))
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    for name, least in (("timeline", level.upper()), ("asyncio", "WARNING"), ("grpc", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False
