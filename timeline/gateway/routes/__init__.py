"""The calls of the HTTP API, grouped by what they are about."""
