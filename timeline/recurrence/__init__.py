"""When something recurs: cron expressions, periods and RFC 5545 rules in a time zone, as exact points in time. Pure: no
clock is read here."""

from timeline.recurrence.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence, WallChange

__all__ = ["FoldPolicy", "GapPolicy", "Occurrence", "Recurrence", "WallChange"]
