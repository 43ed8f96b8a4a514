"""`timeline bench`: speed and lateness on this machine, beside the store alone and beside peers.

`scenarios` are the measurements, `suite` all of them in one invocation, `plots` their curves. `load` puts honest load:
random ids over all buckets. `ledger` checks that each id comes once and on time. `stores` has the topic of a
measurement, and the messages that wait in it. `processes` starts brokers and peers on free ports, and ends them by id.
`figures` are the report. `peers` run beside a scenario.
"""
