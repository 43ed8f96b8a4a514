"""Fairness: limits, and whose turn it is when several peers want the same."""
