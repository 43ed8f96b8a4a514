"""Recurring schedules without I/O: what a schedule says, the record of it, and what each look at it does. No clock is
read here."""

from timeline.schedules.specification import CatchUp, Overlap, Specification

__all__ = ["CatchUp", "Overlap", "Specification"]
