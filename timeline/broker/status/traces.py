"""The broker's part in the traces of messages: storing and delivering, where a message carries a sampled trace and the
broker's process has OpenTelemetry set up (`opentelemetry-instrument timeline serve`)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from timeline import tracing
from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Answers, Status, decode_headers

MOST = 64
"""Spans of one frame: a trace of a batch shows how it went, not each of its thousands."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})")


class Traces:
    """Spans of the broker called `broker`. Costs a look at the headers' bytes where messages have headers and the
    process traces; else nothing."""

    def __init__(self, broker: str) -> None:
        self._broker = broker

    def stored(
        self, topic: str, ids: Ragged, headers: Ragged | None, answers: Answers, begin_ms: float, end_ms: float
    ) -> None:
        """A frame of puts came in at `begin_ms` and was answered at `end_ms`."""
        for by, at, context in self._traced(headers):
            about = self._about(topic, ids[at]) | {"timeline.status": Status.of(int(answers.status[at])).value}
            tracing.passed(by, f"store {topic}", context, begin_ms, end_ms, about)

    def delivered(self, topic: str, consumer: bytes, batch: LeasedBatch, sent_ms: int) -> None:
        """`batch` is on the wire since `sent_ms`: a span from when each was due, as long as it was late."""
        rows = batch.rows
        for by, at, context in self._traced(rows.headers):
            due_ms = min(int(batch.was_due_ms[at]), sent_ms)
            about = self._about(topic, rows.ids[at]) | {
                "messaging.consumer.group.name": consumer.decode("utf-8", "replace"),
                "timeline.deliveries": int(rows.deliveries[at]),
                "timeline.lateness_ms": sent_ms - due_ms,
            }
            tracing.passed(by, f"deliver {topic}", context, due_ms, sent_ms, about)

    def _traced(self, headers: Ragged | None) -> list[tuple[Any, int, dict[str, str]]]:
        """(tracer, place, trace context) of those whose trace is recorded."""
        if headers is None or not headers.nbytes or (by := tracing.tracer()) is None:
            return []
        listed = headers.tolist()
        found = []
        for at in np.flatnonzero([tracing.TRACEPARENT in each for each in listed]).tolist():
            try:
                context = decode_headers(listed[at])
            except Invalid:
                continue  # of a put, which is answered so
            if _sampled(context.get("traceparent", "")):
                found.append((by, at, context))
                if len(found) == MOST:
                    break
        return found

    def _about(self, topic: str, id: bytes) -> dict[str, Any]:
        return {
            "messaging.destination.name": topic,
            "messaging.message.id": id.decode("utf-8", "replace"),
            "timeline.broker": self._broker,
        }


def _sampled(traceparent: str) -> bool:
    """Whether whoever began the trace records it."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found is not None and bool(int(found[1], 16) & 1)
