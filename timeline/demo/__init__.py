"""The demo: a real day of New York's departures goes out on time.

    flights ─ plan ─▶ feeders (a producer a carrier) ─▶ broker ─▶ gates (consumers) ─▶ departed
                          │ put · move · cancel            │ lease · ack · crash
                          └───────── histories ────────────┴──▶ picture ─▶ board
                                        └──────────── checker ─▶ summary

`conductor` starts all of them as processes of their own and ends them; what the summary says comes from the histories
that they wrote and from a last scan, judged against the data.
"""
