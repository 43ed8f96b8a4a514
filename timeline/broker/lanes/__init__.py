"""Lanes: puts and settles on their way to the store, committed in groups; and the metered store."""
