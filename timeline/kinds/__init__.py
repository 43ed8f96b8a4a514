"""Kinds of topic: how a topic treats its messages if kinds differ.

A kind decides when a put, a released and an abandoned message are due, and in which order a bucket is leased. It also
decides from when a delivery counts as late. `timeline.leases` asks it for each decision, the broker once per batch.

Stores apply the rules of `timeline` to whole batches in their own way. For a kind that is not `in_batches`, a store
must ask `leases.decide` about each message. Stores that do so declare `Capabilities.every_kind`; others refuse its
topics.

To add a kind, write its class in a module of its own, and name it in `KINDS` and in `model.KINDS`.
"""

from timeline.kinds.kind import Kind, Scheduled
from timeline.kinds.timeline import TimelineKind
from timeline.model import TopicSettings

KINDS: dict[str, Kind] = {"timeline": TimelineKind()}
"""Each kind by the name that topics give it."""


def kind_of(settings: TopicSettings) -> Kind:
    """Return the kind of a topic with these settings."""
    return KINDS[settings.kind]


__all__ = ["KINDS", "Kind", "Scheduled", "TimelineKind", "kind_of"]
