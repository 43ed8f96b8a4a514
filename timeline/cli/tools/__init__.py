"""Commands that measure and check."""
