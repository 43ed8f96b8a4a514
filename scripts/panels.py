"""The panels of Grafana's dashboard: a row per subject, a panel per question. scripts/dashboard.py writes the file."""

from __future__ import annotations

from dataclasses import dataclass

OF = 'job=~"$job"'
ON = 'job=~"$job",topic=~"$topic"'
FAILED = f'timeline_store_calls_total{{{OF},outcome!="OK"}}'
AT_ONCE = 'route!~".*/(leases|stream)"'
"""Routes that answer at once. A long poll and a stream last as long as nothing is due."""


@dataclass(frozen=True)
class Panel:
    """`queries`: (query, legend). `means`: what its values mean. `unit`: Grafana's name of a unit."""

    title: str
    unit: str
    means: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def quantiles(histogram: str, of: str, by: str, legend: str, *shares: str) -> tuple[tuple[str, str], ...]:
    """Return a query for each of the `shares` of a histogram of seconds, such as 0.99. `by`: labels that stay apart."""
    rate = f"rate({histogram}_seconds_bucket{{{of}}}[$__rate_interval])"
    return tuple(
        (f"histogram_quantile({share}, sum by (le, {by}) ({rate}))", f"{legend} p{float(share) * 100:g}")
        for share in shares
    )


LATENESS = quantiles("timeline_delivery_lateness", ON, "topic", "{{topic}}", "0.5", "0.99", "0.999")
REQUEST_TIMES = quantiles(
    "timeline_gateway_request", f"{OF},{AT_ONCE}", "method, route", "{{method}} {{route}}", "0.5", "0.99"
)
WEBHOOK_TIMES = quantiles("timeline_gateway_webhook", ON, "topic", "{{topic}}", "0.5", "0.99")

BOARD: dict[str, tuple[Panel, ...]] = {
    "Delivery": (
        Panel(
            "Lateness",
            "s",
            "From due until a message was on the wire. The one to watch.",
            LATENESS,
        ),
        Panel(
            "Share later than 100 ms",
            "percentunit",
            "Of the deliveries of five minutes. The objective allows 0.1 % over a month.",
            ((f"timeline:late:ratio5m{{{ON}}}", "{{topic}}"),),
        ),
        Panel(
            "Overdue",
            "s",
            "How long the earliest message that waits for nothing but a delivery has been due.",
            ((f"max by (topic) (timeline_overdue_seconds{{{ON}}})", "{{topic}}"),),
        ),
        Panel(
            "Deliveries",
            "ops",
            "Pushed to consumers.",
            ((f"sum by (topic) (rate(timeline_deliveries_total{{{ON}}}[$__rate_interval]))", "{{topic}}"),),
        ),
        Panel(
            "Leases ended, by cause",
            "ops",
            "ran_out: a consumer crashed, or its lease is too short. unseen: handed back before anybody saw it.",
            (
                (
                    f"sum by (cause) (rate(timeline_leases_ended_total{{{ON}}}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
        ),
        Panel(
            "Trouble with messages",
            "short",
            "Within five minutes: dead letters, acks after the lease, expired, leased again, found by sweeps.",
            (
                (
                    f"sum by (topic, cause) (increase(timeline_buried_total{{{ON}}}[5m])) > 0",
                    "{{topic}} dead: {{cause}}",
                ),
                (f"sum by (topic) (increase(timeline_late_acks_total{{{ON}}}[5m])) > 0", "{{topic}} late acks"),
                (f"sum by (topic) (increase(timeline_expired_total{{{ON}}}[5m])) > 0", "{{topic}} expired"),
                (f"sum by (topic) (increase(timeline_redeliveries_total{{{ON}}}[5m])) > 0", "{{topic}} redelivered"),
                (f"sum by (topic) (increase(timeline_stranded_total{{{ON}}}[5m])) > 0", "{{topic}} found by a sweep"),
            ),
        ),
    ),
    "What is coming": (
        Panel(
            "Expected load",
            "short",
            "Messages that come due within so long from now.",
            ((f"max by (topic, within) (timeline_expected_messages{{{ON}}})", "{{topic}} in {{within}}"),),
        ),
        Panel(
            "Capacity",
            "ops",
            "What the busiest minute of the next ten asks for, and the most that was done for five minutes in a day.",
            (
                (f"timeline:expected_peak:rate1m{{{ON}}}", "{{topic}} expected"),
                (f"timeline:settled:best1d{{{ON}}}", "{{topic}} best of a day"),
                (f"timeline:settled:rate5m{{{ON}}}", "{{topic}} now"),
            ),
        ),
        Panel(
            "Messages without a live lease",
            "short",
            "available: due. waiting: to come.",
            ((f"max by (topic, state) (timeline_messages_depth{{{ON}}})", "{{topic}} {{state}}"),),
        ),
        Panel(
            "Until the next due",
            "s",
            "Below 0 it is due and not delivered.",
            (
                (
                    f"min by (topic) (timeline_next_due_timestamp_seconds{{{ON}}} > 0) - time()",
                    "{{topic}}",
                ),
            ),
        ),
        Panel(
            "Rate limits",
            "ops",
            "Topics whose deliveries a second are limited by their settings.",
            ((f"max by (topic) (timeline_topic_rate_limit{{{ON}}}) > 0", "{{topic}}"),),
        ),
    ),
    "Consumers and producers": (
        Panel(
            "Consumers",
            "short",
            "silent: no heartbeat. stalled: does not read. set_aside: its leases ran out one after another.",
            ((f"sum by (topic, health) (timeline_consumers{{{ON}}}) > 0", "{{topic}} {{health}}"),),
        ),
        Panel(
            "Credit and hands",
            "short",
            "What consumers have room for, and what they have in hand. No room: all are full.",
            (
                (f"sum by (topic) (timeline_credit_messages{{{ON}}})", "{{topic}} room"),
                (f"sum by (topic) (timeline_leases_in_flight{{{ON}}})", "{{topic}} in hand"),
            ),
        ),
        Panel(
            "Answers",
            "ops",
            "Given to producers and consumers.",
            (
                (
                    f"sum by (operation, status) (rate(timeline_operations_total{{{OF}}}[$__rate_interval]))",
                    "{{operation}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Told to wait, refused",
            "ops",
            "Messages answered THROTTLED, by what was full; frames that failed verification.",
            (
                (
                    f"sum by (bound) (rate(timeline_throttled_total{{{OF}}}[$__rate_interval])) > 0",
                    "throttled: {{bound}}",
                ),
                (
                    f"sum by (method) (rate(timeline_frames_refused_total{{{OF}}}[$__rate_interval])) > 0",
                    "refused: {{method}}",
                ),
            ),
        ),
        Panel(
            "Waiting in brokers",
            "bytes",
            "Payloads of puts that wait for the store, and of deliveries that wait for consumers.",
            (
                (f"timeline_intake_bytes{{{OF}}}", "{{instance}} intake"),
                (f"timeline_outbox_bytes{{{OF}}}", "{{instance}} outbox"),
            ),
        ),
    ),
    "HTTP and webhooks": (
        Panel(
            "Requests",
            "reqps",
            "Requests to gateways, by status. 5xx: the brokers, or the gateway itself. 429: a bound was reached.",
            (
                (
                    f"sum by (status) (rate(timeline_gateway_requests_total{{{OF}}}[$__rate_interval]))",
                    "{{status}}",
                ),
            ),
        ),
        Panel(
            "Time to answer requests",
            "s",
            "From a request to the end of its answer. Long polls and event streams are left out: they wait.",
            REQUEST_TIMES,
        ),
        Panel(
            "Requests under way",
            "short",
            "Requests without an answer so far, long polls included, and open event streams.",
            (
                (f"timeline_gateway_requests_in_flight{{{OF}}}", "{{instance}} requests"),
                (f"timeline_gateway_streams{{{OF}}}", "{{instance}} streams"),
            ),
        ),
        Panel(
            "Webhooks, by effect",
            "reqps",
            "ack: done. keep: leased on. release: the receiver failed, and gets it again. bury: a dead letter.",
            (
                (
                    f"sum by (topic, effect) (rate(timeline_gateway_webhooks_total{{{ON}}}[$__rate_interval]))",
                    "{{topic}} {{effect}}",
                ),
            ),
        ),
        Panel(
            "Time until receivers answer",
            "s",
            "From sending a webhook to its answer. Above push_timeout there is none.",
            WEBHOOK_TIMES,
        ),
        Panel(
            "Receivers that are down",
            "short",
            "Hosts that failed several times in a row. Nothing but a probe is sent to them until one answers.",
            ((f"timeline_gateway_circuits_open{{{OF}}}", "{{instance}}"),),
        ),
    ),
    "Recurring schedules": (
        Panel(
            "Occurrences, by outcome",
            "short",
            "Per minute. missed and failed were not produced. caught_up came late, after an outage.",
            (
                (
                    f"60 * sum by (topic, outcome) "
                    f"(rate(timeline_schedule_occurrences_total{{{ON}}}[$__rate_interval]))",
                    "{{topic}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Schedules, by state",
            "short",
            "waiting: the occurrence before is not finished yet. ended: none follows.",
            ((f"max by (topic, state) (timeline_schedules{{{ON}}})", "{{topic}} {{state}}"),),
        ),
        Panel(
            "Time since the last and until the next occurrence",
            "s",
            "since: an occurrence was put. until: the next one is due. overdue: for how long it should have been put.",
            (
                (
                    f"time() - (max by (topic) (timeline_schedule_last_timestamp_seconds{{{ON}}}) > 0)",
                    "since {{topic}}",
                ),
                (
                    f"(max by (topic) (timeline_schedule_next_timestamp_seconds{{{ON}}}) > 0) - time()",
                    "until {{topic}}",
                ),
                (f"max by (topic) (timeline_schedule_overdue_seconds{{{ON}}})", "overdue {{topic}}"),
            ),
        ),
    ),
    "Store": (
        Panel(
            "Store calls, p99",
            "s",
            "How long calls of the store took.",
            (
                (
                    "histogram_quantile(0.99, sum by (le, call) "
                    f"(rate(timeline_store_call_seconds_bucket{{{OF}}}[$__rate_interval])))",
                    "{{call}}",
                ),
            ),
        ),
        Panel(
            "Store calls that failed",
            "ops",
            "By outcome. UNAVAILABLE: nothing happened. UNKNOWN: it may have.",
            (
                (
                    f"sum by (call, outcome) (rate({FAILED}[$__rate_interval])) > 0",
                    "{{call}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Room left",
            "percentunit",
            "Where the store keeps its data; of a server elsewhere a broker cannot tell.",
            ((f"timeline_store_free_bytes{{{OF}}} / timeline_store_size_bytes{{{OF}}}", "{{instance}}"),),
        ),
        Panel(
            "Stores",
            "short",
            "What keeps the messages, and how many of its settings weaken what it promises (the log says which).",
            (
                (f"timeline_store_info{{{OF}}}", "{{instance}}: {{server}}"),
                (f"timeline_store_warnings{{{OF}}} > 0", "{{instance}}: warnings"),
            ),
        ),
    ),
    "Cluster": (
        Panel(
            "Brokers",
            "short",
            "Their names and versions; and whether they serve.",
            (
                (f"timeline_broker_info{{{OF}}}", "{{instance}}: {{name}} {{version}}"),
                (f"timeline_ready{{{OF}}}", "{{instance}} serves"),
            ),
        ),
        Panel(
            "Membership",
            "short",
            "Brokers that each of them sees, and whether it reaches etcd.",
            (
                (f"timeline_cluster_brokers{{{OF}}}", "{{instance}} sees"),
                (f"timeline_etcd_up{{{OF}}}", "{{instance}} reaches etcd"),
                (
                    f"sum by (outcome) (rate(timeline_hints_total{{{OF}}}[$__rate_interval]))",
                    "hints {{outcome}} a second",
                ),
            ),
        ),
        Panel(
            "Buckets dealt",
            "short",
            "By broker, over all topics shown.",
            ((f"sum by (instance) (timeline_buckets{{{ON}}})", "{{instance}}"),),
        ),
        Panel(
            "Clocks, against the median",
            "s",
            "Of each broker, and by how much that may be wrong. From 50 ms it warns, from 500 ms it steps aside.",
            (
                (f"timeline_clock_median_offset_seconds{{{OF}}}", "{{instance}}"),
                (f"timeline_clock_median_error_seconds{{{OF}}}", "{{instance}} ±"),
                (f"timeline_clocks_compared{{{OF}}}", "{{instance}}: clocks compared"),
            ),
        ),
        Panel(
            "Clocks, one against another",
            "s",
            "By how much another clock is ahead of a broker's; of its consumers the one that is worst.",
            (
                (f"timeline_clock_offset_seconds{{{OF}}}", "{{instance}} {{kind}} {{peer}}"),
                (f"timeline_clock_error_seconds{{{OF}}}", "{{instance}} {{kind}} {{peer}} ±"),
            ),
        ),
        Panel(
            "Clocks in doubt",
            "short",
            "Brokers in quarantine, and jumps of the wall clock that are not followed yet, in seconds.",
            (
                (f"timeline_quarantined{{{OF}}}", "{{instance}} in quarantine"),
                (f"timeline_clock_step_seconds{{{OF}}}", "{{instance}} jump"),
                (f"timeline_clients_adrift{{{OF}}}", "{{instance}} consumers adrift"),
            ),
        ),
        Panel(
            "Callers refused",
            "ops",
            "For who called, by cause. A burst is a client that was forgotten, or somebody who tries.",
            (
                (
                    f"sum by (instance, cause) (rate(timeline_access_refused_total{{{OF}}}[$__rate_interval])) > 0",
                    "{{instance}} {{cause}}",
                ),
            ),
        ),
        Panel(
            "Certificates",
            "s",
            "How long those of brokers are good for. Below two weeks nobody renews them.",
            (
                (
                    f"(timeline_certificate_expires_timestamp_seconds{{{OF}}} > 0) - time()",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Journal",
            "ops",
            "Events handed to the journal, and those that it could not take: they are missing in it.",
            (
                (f"sum by (instance) (rate(timeline_journal_events_total{{{OF}}}[$__rate_interval]))", "{{instance}}"),
                (
                    f"sum by (instance) (rate(timeline_journal_dropped_total{{{OF}}}[$__rate_interval])) > 0",
                    "{{instance}} dropped",
                ),
                (
                    f"sum by (instance) (increase(timeline_journal_restarts_total{{{OF}}}[$__rate_interval])) > 0",
                    "{{instance}} restarts",
                ),
            ),
        ),
        Panel(
            "Bugs",
            "short",
            "Background tasks that ended by an error. The log has the trace.",
            ((f"sum by (instance, task) (timeline_task_crashes_total{{{OF}}}) > 0", "{{instance}} {{task}}"),),
        ),
    ),
}
