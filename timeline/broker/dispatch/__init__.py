"""Dispatch: what is due goes to one healthy consumer, never early. One event loop, no I/O."""
