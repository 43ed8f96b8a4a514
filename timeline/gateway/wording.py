"""Errors in the words of HTTP. The command line and the driver have the same sentences, with names of their own."""

from __future__ import annotations

import re
from functools import lru_cache

_MESSAGE = "GET /v1/topics/{topic}/messages/{id}"
_RESUME = "as 'resume' of the answer had it"
_WORDS = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"\bin_=", "in"),
        (r"\b(at|due_from|due_to|expires)=(?=-?\d)", r"\1 "),
        (r"(?<=setting )horizon=, --horizon", "horizon"),
        (r"\(group=…, --group NAME\)", "('group')"),
        (r"\(create_topic, 'timeline topic create'\)", "(PUT /v1/topics/{topic})"),
        (r"`timeline topic update \S+ [^`]*` changes it, or update_topic", "PATCH /v1/topics/{topic} changes it"),
        (r"\bleased=True", "?leased=true"),
        (r"\btl\.get\(topic, id\)", _MESSAGE),
        (r"as it was printed: `progress\.resume` in Python, after --resume in a shell", _RESUME),
        (r"\(d\.receipt\)", "('receipt')"),
        (r"\bNone or empty would\b", "an empty one would"),
        (r"due= is a pair \(from, to\) with from before to", "due_from must lie before due_to"),
        (r"after retry_after_ms", "after the time in Retry-After"),
        (r", or use a consumer: tl\.consumer\(topic\)", ""),
    )
)


@lru_cache(1024)
def in_words_of_http(sentence: str) -> str:
    """Return a sentence with HTTP's names in place of those of the driver and of the command line."""
    for theirs, ours in _WORDS:
        sentence = theirs.sub(ours, sentence)
    return sentence
