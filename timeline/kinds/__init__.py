"""Kinds of topic: what a topic does with its messages where kinds differ.

A kind says when a put, a released and an abandoned message are due, in which order a bucket is leased, and from when a
delivery counts as late. `timeline.leases` asks it for each decision, the broker once per batch. Stores apply the rules
of `timeline` to whole batches in their own way. For a kind that is not `in_batches` a store has to ask `leases.decide`
about each message: `memory` and the reference store do, the others not yet.

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
