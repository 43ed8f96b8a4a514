"""Recurring schedules at a broker: looks at those that are due for one, and the calls that make and change them.

    ~schedules ─▶ dealer ─▶ ScheduleRunner ─▶ occurrences, as puts into their topics ─▶ the next record
    a call ─▶ ScheduleHandler ─▶ the next record ─▶ occurrences of the old one are cancelled

A record never changes in place. The put of the next one is the compare-and-set between looks, edits and brokers.
"""
