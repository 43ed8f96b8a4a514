"""The OpenAPI document: what the framework and msgspec know of calls and shapes, and what `rules` adds to it."""
