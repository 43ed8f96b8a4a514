"""Why a delivery was late, in words: what happened, and what to do about it."""

from __future__ import annotations

from timeline.wire import Cause

HAPPENED: dict[Cause, str] = {
    Cause.UNEXPLAINED: "no cause was noted",
    Cause.NO_CONSUMER: "no consumer was connected",
    Cause.NO_CREDIT: "every consumer was full",
    Cause.STORE_SLOW: "the store was slow",
    Cause.NO_BROKER: "no broker had its bucket",
    Cause.BROKER_DOWN: "the broker was down",
    Cause.PAUSED: "the topic was paused",
    Cause.RATE_LIMITED: "the topic's rate limit held it back",
    Cause.CLOCK: "a clock was set",
    Cause.PRODUCED_LATE: "it was put or moved too late",
    Cause.LEASE_RAN_OUT: "a consumer let its lease run out",
}
"""What happened, short enough for a table."""

ADVICE: dict[Cause, str] = {
    Cause.UNEXPLAINED: "if many are so, look at the broker's processor time and its log",
    Cause.NO_CONSUMER: "keep a consumer connected: 'timeline top' shows who is",
    Cause.NO_CREDIT: "start more consumers, give them more credit, or let their handlers take less time",
    Cause.STORE_SLOW: "look at timeline_store_call_seconds in /metrics, and at the disk or database behind the store; "
    "'timeline topic update TOPIC --lease-ahead 1s' leases before short stalls",
    Cause.NO_BROKER: "a bucket was between two brokers: it settles by itself within seconds",
    Cause.BROKER_DOWN: "it was delivered once a broker was back",
    Cause.PAUSED: "'timeline topic resume TOPIC' lets it deliver",
    Cause.RATE_LIMITED: "'timeline topic update TOPIC --max-rate-per-s N' raises the limit, 0 lifts it",
    Cause.CLOCK: "keep the clocks of brokers in step (chrony or ntpd)",
    Cause.PRODUCED_LATE: "its due was past, or nearly so, when the broker got it: nothing was slow here",
    Cause.LEASE_RAN_OUT: "it was delivered before and not settled in time: a longer --lease, or extend while it works",
}
"""What to do about it."""

LEARNT: dict[Cause, str] = ADVICE | {Cause.PAUSED: "it was delivered once the topic was resumed"}
"""The same of a delivery that is over."""

KEEPS: dict[Cause, str] = HAPPENED | {
    Cause.UNEXPLAINED: "nothing that the broker knows of keeps it; it should go at once",
    Cause.NO_CONSUMER: "no consumer is connected",
    Cause.NO_CREDIT: "every consumer is full",
    Cause.STORE_SLOW: "the store is slow",
    Cause.NO_BROKER: "no broker has its bucket",
    Cause.PAUSED: "the topic is paused",
    Cause.RATE_LIMITED: "the topic's rate limit holds it back",
}
"""What keeps a message that is due from being delivered."""
