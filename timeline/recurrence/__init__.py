"""When something recurs: cron expressions, periods and RFC 5545 rules in a time zone, as exact points in time. Pure: no
clock is read here."""

from timeline.recurrence.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence, WallChange
from timeline.recurrence.rules import rules_are_readable

__all__ = ["FoldPolicy", "GapPolicy", "Occurrence", "Recurrence", "WallChange", "rules_are_readable"]
