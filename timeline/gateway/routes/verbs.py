"""Paths such as /v1/topics/{topic}/schedules/{name}:pause, whose last part is a name with a verb.

The framework takes a parameter for a whole part of a path. So for it, the verb is a part of its own: …/{name}/:pause.
"""

from __future__ import annotations

import re

_CALLED = re.compile(r"(/v1/topics/[^/]+/schedules/[^/:]+)(:[a-z]+)")
_APART = re.compile(r"(/v1/topics/[^/]+/schedules/[^/:]+)/(:[a-z]+)")


def verb_apart(path: str) -> str:
    """Return a path as the framework has it.

    >>> verb_apart("/v1/topics/mails/schedules/daily:pause")
    '/v1/topics/mails/schedules/daily/:pause'
    """
    return re.sub(_CALLED, r"\1/\2", path) if _CALLED.fullmatch(path) else path


def as_called(path: str) -> str:
    """Return a path, or a template of paths, as callers write it.

    >>> as_called("/v1/topics/{topic}/schedules/{name}/:pause")
    '/v1/topics/{topic}/schedules/{name}:pause'
    """
    return re.sub(_APART, r"\1\2", path)
