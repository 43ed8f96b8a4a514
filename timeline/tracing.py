"""Traces that go on when a message comes due: W3C trace context in its headers, and OpenTelemetry's spans.

Nothing of OpenTelemetry is imported from here on its own account: a program that traces has imported it and set up a
tracer provider. Where it has not, `tracer` answers None after one look into `sys.modules`, which is all that it costs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

TRACEPARENT = b"\x0b\x00traceparent"
"""Where a message's encoded headers have a trace context, they have this: the key with its length before it."""
SYSTEM = {"messaging.system": "timeline"}


def tracer() -> Any:
    """The tracer of the program's provider; None unless it has set one up."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    return provider.get_tracer("timeline")


@contextmanager
def sending(by: Any, topic: str, count: int, id: str = "") -> Iterator[dict[str, str]]:
    """A producer's span around a put of `count` messages by the tracer `by`; the headers that make what follows part of
    its trace. `id`: of a single message."""
    attributes = {"messaging.operation.type": "send", "messaging.destination.name": topic}
    more = {"messaging.message.id": id} if id else {"messaging.batch.message_count": count}
    with by.start_as_current_span(f"send {topic}", kind=_kind("PRODUCER"), attributes={**SYSTEM, **attributes, **more}):
        context: dict[str, str] = {}
        _propagator().inject(context)
        yield context


@contextmanager
def processing(
    by: Any, topic: str, headers: Mapping[str, str], about: Mapping[str, Any], expected: tuple[type[BaseException], ...]
) -> Iterator[Any]:
    """A consumer's span around the handling of one message, in the trace that its headers tell of. An error that is not
    `expected` is the span's, too."""
    attributes = {**SYSTEM, "messaging.operation.type": "process", "messaging.destination.name": topic, **about}
    with by.start_as_current_span(
        f"process {topic}",
        context=_propagator().extract(headers),
        kind=_kind("CONSUMER"),
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except Exception as error:
            if not isinstance(error, expected):
                span.record_exception(error)
                span.set_status(sys.modules["opentelemetry.trace"].StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise


def passed(
    by: Any, name: str, headers: Mapping[str, str], begin_ms: float, end_ms: float, about: Mapping[str, Any]
) -> None:
    """A span of what is over already, `begin_ms` to `end_ms` UTC, in the trace that a message's headers tell of."""
    span = by.start_span(
        name,
        context=_propagator().extract(headers),
        kind=_kind("INTERNAL"),
        attributes={**SYSTEM, **about},
        start_time=int(begin_ms * 1e6),
    )
    span.end(int(end_ms * 1e6))


def _kind(name: str) -> Any:
    return getattr(sys.modules["opentelemetry.trace"].SpanKind, name)


def _propagator() -> Any:
    """W3C's, whatever else the program uses over HTTP: it is what messages carry."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
