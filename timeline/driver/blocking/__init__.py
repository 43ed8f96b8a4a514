"""The client for plain threads: the same words without await."""
