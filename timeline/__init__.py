"""Timeline, a scheduling service.

A producer puts a message on a topic's timeline at a due time. At that time, never before, a broker pushes it to one
healthy consumer under a lease.

    producer ─ driver ─ wire ─▶ broker ─ intake ─▶ store            (stored, answered after the store's commit)
                                  │                  │
                             dealer (due?) ◀─ next due┘
                                  │ lease = the message moves forward in time
                                  ▼
                consumer ◀─ driver ◀─ wire ─ push, round-robin to consumers with credit
                     └─ ack · extend · release · bury ─▶ any broker ─▶ store

    import timeline

    async with timeline.connect("localhost:9000") as tl:
        await tl.create_topic("departures", lease="30s")
        async with tl.producer("departures") as p:
            await p.produce(b"gate closes", at=when, id="UA1545")
        async with tl.consumer("departures", id="worker-1") as c:
            async for d in c:
                await d.ack()

`timeline.connect_sync` has the same words without await. A message's way by folder: `driver/` → `wire/` → `broker/` →
`leases/` (the rules) → `storage_plugins/`, and back.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from timeline.errors import (
    Closed,
    Dead,
    Exists,
    Expired,
    Fenced,
    Forbidden,
    Invalid,
    Leased,
    LeaseLost,
    NotFound,
    Superseded,
    Throttled,
    TimelineError,
    TooLarge,
    Unavailable,
    Unknown,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from timeline.driver.batch import Batch
    from timeline.driver.blocking.calls import SyncDelivery, SyncDeliveryBatch
    from timeline.driver.blocking.client import SyncConsumer, SyncProducer, SyncTimeline, connect_sync
    from timeline.driver.blocking.schedules import SyncSchedule
    from timeline.driver.client import Timeline, connect
    from timeline.driver.consume.handlers import Backoff, Bury, Retry
    from timeline.driver.consume.pull import PulledDelivery
    from timeline.driver.consumer import Consumer
    from timeline.driver.delivery import Delivery, DeliveryBatch
    from timeline.driver.late import Cause, LateDelivery, LateReport, Why
    from timeline.driver.message import Message, StoredMessage
    from timeline.driver.mutations import TagProgress
    from timeline.driver.producer import Producer
    from timeline.driver.queries import Counts, Outlook
    from timeline.driver.receipts import Receipt, Receipts
    from timeline.driver.schedules import Backfill, Schedule, ScheduleState
    from timeline.driver.times import local
    from timeline.model import State, Status, Topic, TopicSettings
    from timeline.recurrence import FoldPolicy, GapPolicy
    from timeline.schedules import CatchUp, Overlap, Specification

# Set before gRPC is imported, unless the user has set them. Its C library then keeps its log lines from people's
# terminals: errors reach us anyway. It also leaves forked children alone: its handlers crash one child in ten that was
# forked during a call. Our children do not use gRPC (driver/transport/relay.py).
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Looked up on first use, so that `import timeline` costs next to nothing.
_HOMES = {
    "timeline.driver.batch": ("Batch",),
    "timeline.driver.client": ("Timeline", "connect"),
    "timeline.driver.consumer": ("Consumer",),
    "timeline.driver.delivery": ("Delivery", "DeliveryBatch"),
    "timeline.driver.consume.handlers": ("Backoff", "Bury", "Retry"),
    "timeline.driver.consume.pull": ("PulledDelivery",),
    "timeline.driver.message": ("Message", "StoredMessage"),
    "timeline.driver.mutations": ("TagProgress",),
    "timeline.driver.producer": ("Producer",),
    "timeline.driver.late": ("Cause", "LateDelivery", "LateReport", "Why"),
    "timeline.driver.queries": ("Counts", "Outlook"),
    "timeline.driver.receipts": ("Receipt", "Receipts"),
    "timeline.driver.blocking.client": ("SyncConsumer", "SyncProducer", "SyncTimeline", "connect_sync"),
    "timeline.driver.blocking.calls": ("SyncDelivery", "SyncDeliveryBatch"),
    "timeline.driver.blocking.schedules": ("SyncSchedule",),
    "timeline.driver.schedules": ("Backfill", "Schedule", "ScheduleState"),
    "timeline.driver.times": ("local",),
    "timeline.model": ("State", "Status", "Topic", "TopicSettings"),
    "timeline.recurrence": ("FoldPolicy", "GapPolicy"),
    "timeline.schedules": ("CatchUp", "Overlap", "Specification"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'timeline' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


__all__ = [
    "Backfill", "Backoff", "Batch", "Bury", "CatchUp", "Cause", "Closed", "Consumer", "Counts", "Dead", "Delivery",
    "DeliveryBatch", "Exists", "Expired", "Fenced", "FoldPolicy", "Forbidden", "GapPolicy", "Invalid", "LateDelivery",
    "LateReport", "LeaseLost", "Leased", "Message", "NotFound", "Outlook", "Overlap", "Producer", "PulledDelivery",
    "Receipt", "Receipts", "Retry", "Schedule", "ScheduleState", "Specification", "State", "Status", "StoredMessage",
    "Superseded", "SyncConsumer", "SyncDelivery", "SyncDeliveryBatch", "SyncProducer", "SyncSchedule", "SyncTimeline",
    "TagProgress", "Throttled", "Timeline", "TimelineError", "TooLarge", "Topic", "TopicSettings", "Unavailable",
    "Unknown", "Why", "connect", "connect_sync", "local",
]  # fmt: skip
