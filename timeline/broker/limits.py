"""Every bound of a broker, with its unit. Past a bound callers get THROTTLED and a wait, never a growing queue."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and rhythms of one broker."""

    heartbeat_ms: int = 2_000
    heartbeats_per_s: int = 100
    heartbeat_cap_ms: int = 15_000
    """If more consumers are connected than `heartbeats_per_s` allows, each beats less often, up to the cap."""
    heartbeats_missed: int = 3
    """A consumer that misses this many heartbeats gets nothing until it is heard again."""
    sweep_every_ms: int = 5_000
    count_every_ms: int = 5_000
    """The store's messages are counted no more often, and less often if that costs much."""
    stranded_after_ms: int = 2_000
    """A sweep takes from other dispatchers' buckets only what is overdue by more than this."""
    stall_ms: int = 10_000
    """A stream or scan ends if its reader does not take a frame for this long."""
    pull_idle_ms: int = 60_000
    pull_yield_ms: int = 10_000
    """The consumer that a topic's Takes share leaves if none has come for this long. It leaves sooner if other brokers
    have consumers of the topic, which would wait for the buckets that are dispatched here."""
    lapses_tolerated: int = 3
    """A consumer is suspended after its leases ran out this often in a row, a heartbeat (or shorter lease) apart."""
    set_aside_first_ms: int = 1_000
    set_aside_cap_ms: int = 60_000
    intake_bytes: int = 64 * MIB
    intake_messages: int = 200_000
    """Puts waiting for the store, in all."""
    settles_waiting: int = 500_000
    settles_bytes: int = 64 * MIB
    """Settles waiting for the store, in all."""
    store_batch_messages: int = 10_000
    store_batch_bytes: int = 2 * MIB
    """One store call, but for a single larger frame of puts."""
    shared_batch_messages: int = 150
    shared_batch_bytes: int = MIB
    """The same if several connections put or settle, and the store is part of this process. Nothing else happens during
    its calls, so the next peer waits for no more than this."""
    lately_ms: int = 1_000
    """A peer that put or settled within this time counts as one that does."""
    streams: int = 10_000
    """Two-way streams (of producers and consumers) at once, in all."""
    streams_per_peer: int = 5_000
    """The same from one host."""
    scans: int = 64
    """Scans under way, in all."""
    hello_ms: int = 10_000
    """A stream ends if nothing was said for this long after it was opened."""
    requests_per_stream: int = 64
    """Produce frames of one stream under way. Past it the stream is not read."""
    stream_bytes: int = 16 * MIB
    """The same in bytes, but for a single larger frame."""
    calls_in_flight: int = 256
    calls_bytes: int = 64 * MIB
    """Unary calls under way, in all."""
    edit_wait_ms: int = 1_500
    """An edit of a schedule that waits this long for the edits before it is refused: nothing happened. If it waited on,
    its caller would learn at the deadline that nobody knows."""
    lease_messages: int = 5_000
    lease_bytes: int = 16 * MIB
    consumers_dealt: int = 512
    """One dealing round."""
    step_share: int = 4
    step_messages: int = 64
    """A quarter of a consumer's credit, or this many messages if that is less, is worth a round."""
    step_wait_ms: int = 100
    """While more is due than there is credit for, a round for less than that waits this long at most."""
    outbox_bytes: int = 8 * MIB
    """Waiting to be pushed to one consumer. Past it the consumer is dealt nothing."""
    outboxes_bytes: int = 128 * MIB
    """The same over all consumers."""
    deliver_messages: int = 5_000
    deliver_bytes: int = MIB
    """One frame of deliveries, but for a single larger message."""
    answers_waiting: int = 256
    """Frames waiting to be sent to one consumer. Past it the consumer is not read."""
    lease_along_ms: int = 10
    """A round that leases ahead takes along what comes due this soon after what it began for."""
    ahead_messages: int = 64
    """Most messages of the first round ahead of a due time. After a full round the next takes more."""
    ahead_messages_per_ms: int = 4
    """More messages for each millisecond that is left until that due time."""
    late_ms: int = 50
    slow_ms: int = 10
    """A store call that takes this long is remembered as a cause of lateness."""
    late_kept: int = 10_000
    throttle_ms: int = 100
    """The wait that a throttled caller is asked for."""
    catalog_every_ms: int = 15_000
    hints_waiting: int = 10_000
    """What is yet to be told to one other broker: a topic's next due, or a consumer that connected. Past it a hint is
    dropped."""
    hint_pace_ms: int = 2
    """Between two calls with hints to one broker, which gather meanwhile. After a failed call:"""
    hint_rest_ms: int = 250
    hint_timeout_ms: int = 1_000
    retell_ms: int = 5_000
    """New due times are hinted again for this long, up to twice as long, if their dispatcher changes. Membership may
    take this long to agree."""
    withdraw_after_ms: int = 2_000
    """If a broker's store is down for this long, it hosts no consumers: its buckets move."""
    observe_every_ms: int = 250
    clocks_every_ms: int = 1_000
    """How often the clocks of others are measured."""
    clock_answer_ms: int = 1_000
    """A clock that does not answer for this long is left out."""
    clocks_measured: int = 64
    """Brokers, at once."""
    peers: int = 256
    """Connections to other brokers."""
    check_every_ms: int = 1_000
    inspect_every_ms: int = 10_000
    """How often a healthy store is asked for its settings, and whether it is still the one that was opened."""
    hand_back_ms: int = 2_000
    """How long a broker that leases no more waits for unpushed leases to be released, before consumers must leave."""
    drain_streams_ms: int = 10_000
    """How long a draining broker waits for streams that were asked to leave, and reads settles from them. What a
    consumer has not read by then is delivered again."""

    def heartbeat_of(self, streams: int) -> int:
        """Return the heartbeat, in ms, of a consumer that joins as the last of `streams`."""
        shared_ms = min(self.heartbeat_cap_ms, 1_000 * streams // self.heartbeats_per_s)
        return max(self.heartbeat_ms, shared_ms)
