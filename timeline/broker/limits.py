"""Every bound of a broker, with its unit. Past a bound callers get THROTTLED and a wait, never a growing queue."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one broker holds at most, and its rhythms."""

    heartbeat_ms: int = 2_000
    heartbeats_per_s: int = 100
    heartbeat_cap_ms: int = 15_000
    """Where so many are connected that there would be more, each is told to beat less often, up to the cap."""
    heartbeats_missed: int = 3
    """A consumer not heard of for so many heartbeats gets nothing until it is heard again."""
    sweep_every_ms: int = 5_000
    count_every_ms: int = 5_000
    """What the store has is counted no more often, and less often where that costs much."""
    stranded_after_ms: int = 2_000
    """A sweep takes from buckets that others deal only what is overdue by more than this."""
    stall_ms: int = 10_000
    """A stream, or a scan, whose reader does not take a frame for so long ends."""
    lapses_tolerated: int = 3
    """So often in a row leases of a consumer ran out, a heartbeat apart (or a lease, if shorter): it is set aside."""
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
    """The same where several connections put, or settle, and the store is a part of this process, which does nothing
    else meanwhile: who comes next waits for no more than this."""
    lately_ms: int = 1_000
    """Who put or settled within so long counts as one of those who do."""
    streams: int = 10_000
    """Two-way streams (of producers and consumers) at once, in all."""
    streams_per_peer: int = 5_000
    """The same from one host."""
    scans: int = 64
    """Scans under way, in all."""
    hello_ms: int = 10_000
    """A stream on which nothing was said for so long after it was opened ends."""
    requests_per_stream: int = 64
    """Produce frames of one stream under way; past it the stream is not read."""
    stream_bytes: int = 16 * MIB
    """The same in bytes, but for a single larger frame."""
    calls_in_flight: int = 256
    calls_bytes: int = 64 * MIB
    """Unary calls under way, in all."""
    lease_messages: int = 5_000
    lease_bytes: int = 16 * MIB
    consumers_dealt: int = 512
    """One dealing round."""
    step_share: int = 4
    step_messages: int = 64
    """A quarter of a consumer's credit, or so many messages if that is less: so much free credit is worth a round."""
    step_wait_ms: int = 100
    """While more is due than there is credit for, a round for less than that waits so long at most."""
    outbox_bytes: int = 8 * MIB
    """Waiting to be pushed to one consumer; past it the consumer is dealt nothing."""
    outboxes_bytes: int = 128 * MIB
    """The same over all consumers."""
    deliver_messages: int = 5_000
    deliver_bytes: int = MIB
    """One frame of deliveries, but for a single larger message."""
    answers_waiting: int = 256
    """Frames waiting to be sent to one consumer; past it the consumer is not read."""
    lease_along_ms: int = 10
    """A round that leases ahead takes along what comes due so soon after what it began for."""
    ahead_messages: int = 64
    """The first dealing round ahead of a due takes so many at most; after a full one the next takes more."""
    ahead_messages_per_ms: int = 4
    """And so many for each millisecond that is left until that due."""
    late_ms: int = 50
    slow_ms: int = 10
    """A store call that takes so long is remembered as a cause of lateness."""
    late_kept: int = 10_000
    throttle_ms: int = 100
    """How long a throttled caller is told to wait."""
    catalog_every_ms: int = 15_000
    hints_waiting: int = 10_000
    """Topics whose next due is yet to be told to one other broker; past it a hint is dropped."""
    hint_pace_ms: int = 2
    """Between two calls with hints to one broker, which gather meanwhile; and after one that failed:"""
    hint_rest_ms: int = 250
    hint_timeout_ms: int = 1_000
    retell_ms: int = 5_000
    """For so long, and up to twice as long, what was due anew is told again when others deal it: as long as membership
    may take to agree."""
    withdraw_after_ms: int = 2_000
    """A broker whose store is down for so long deals nothing as far as the others are told: its buckets move."""
    observe_every_ms: int = 250
    clocks_every_ms: int = 1_000
    """How often the clocks of others are measured."""
    clock_answer_ms: int = 1_000
    """One that does not answer for so long is left out."""
    clocks_measured: int = 64
    """Brokers, at once."""
    peers: int = 256
    """Connections to other brokers."""
    check_every_ms: int = 1_000
    inspect_every_ms: int = 10_000
    """How often a store that is well is asked for its settings, and whether it is still the one that was opened."""
    hand_back_ms: int = 2_000
    """How long a broker that deals no more waits until what it did not push is back, before it tells consumers to
    leave."""
    drain_streams_ms: int = 2_000
    """How long a draining broker goes on reading settles from streams that were told to leave."""

    def heartbeat_of(self, streams: int) -> int:
        """How often one that joins as the last of so many beats, in ms."""
        shared_ms = min(self.heartbeat_cap_ms, 1_000 * streams // self.heartbeats_per_s)
        return max(self.heartbeat_ms, shared_ms)
