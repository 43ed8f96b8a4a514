"""The errors of callers: a code, whether to try again, the message's id, and what to do about it.

An exception stands for one *status* of `timeline.model.Status`, which is its `code`. SUPERSEDED, LEASE_LOST and CLOSED
are conditions that only a driver meets. `retryable` says whether the same call may succeed later without anybody
changing anything.
"""

from __future__ import annotations

from typing import Any

STAYS = "the same call fails again until that is fixed"
"""Ends the reason of an error that is retryable by its kind and not by its cause, instead of advice to try again."""

REPEAT = "repeat the same call (same id) to learn which"
"""The remedy for UNKNOWN, where it is said already that the call may or may not have happened."""

TWICE = "Without it, messages may be changed twice"
"""Why a call by tag that broke off must not be repeated as it was."""

FIXED_LIMIT = "no setting raises this limit: make it smaller"
"""The advice for anything that is too large for every topic."""


class TimelineError(Exception):
    """Base of all errors of this package.

    `code`: the status or condition, upper case. `retryable`: the same call may succeed later.
    `id`: the message it is about, None when it is about the call. `advice`: what to do about it.
    `progress`: how far a call by tag came, a `TagProgress`; None for every other call.
    `found`: what is at the addresses that could not be reached, each a name of `ProbeResult`; or the `Fault` of a
    refusal that concerns the token. `lasting`: the same call fails again until that is fixed.
    """

    code = "ERROR"
    retryable = False
    advice = ""
    progress: Any = None
    found: tuple[str, ...] = ()
    lasting = False

    def __init__(self, reason: str = "", *, id: str | None = None, retry_after_ms: int = 0, advice: str = "") -> None:
        self.reason = reason
        if advice:
            self.advice = advice
        self.id = id
        self.retry_after_ms = retry_after_ms
        about = f"{self.code} {id!r}" if id is not None else self.code
        super().__init__(": ".join(part for part in (about, reason or self.advice) if part))

    def __str__(self) -> str:
        """Return the error in words. A call by tag that broke off adds its token. In a program that does not
        catch the error, the traceback is all that is left of the progress."""
        said = super().__str__()
        if self.progress is None or self.advice == type(self).advice:
            return said
        token = self.progress.resume
        return f"{said.removesuffix('.')}. To continue, repeat the same call with resume={token!r}. {TWICE}"

    def __reduce__(self) -> tuple[object, ...]:
        rest = {name: value for name, value in vars(self).items() if name in ("progress", "found", "lasting")} or None
        return (_rebuild, (type(self), self.reason, self.id, self.retry_after_ms, self.advice), rest)


def _rebuild(kind: type[TimelineError], reason: str, id: str | None, retry_after_ms: int, advice: str) -> TimelineError:
    return kind(reason, id=id, retry_after_ms=retry_after_ms, advice=advice)


class NotFound(TimelineError):
    """No message has this id: never put, or settled, cancelled, purged or expired."""

    code = "NOT_FOUND"
    advice = "no message has this id. It was never produced, or it was acknowledged, cancelled, purged or expired"


class Exists(TimelineError):
    """The id is taken by another message (another birth with another payload)."""

    code = "EXISTS"
    advice = 'the id is taken by another message: choose another id, or if_exists="replace" to replace that message'


class Leased(TimelineError):
    """A consumer has the message now."""

    code = "LEASED"
    advice = "a consumer has it now: wait until it settles"


class Fenced(TimelineError):
    """The token is stale, somebody else holds the lease, or the message stands at another version than `if_version`;
    nothing was changed."""

    code = "FENCED"
    advice = "the token is stale: somebody leased, moved or released the message since; drop this delivery"


class Forbidden(TimelineError):
    """The message belongs to another producer group, or the token that the call came with has not the right."""

    code = "FORBIDDEN"
    advice = "it belongs to another producer group: act for that one (group=…, --group NAME)"


class Invalid(TimelineError, ValueError):
    """An argument is out of its range; the message says which and what is allowed."""

    code = "INVALID"
    advice = "an argument is out of its allowed range"


class TooLarge(TimelineError):
    """Payload, headers or frame exceed the allowed size."""

    code = "TOO_LARGE"
    advice = "make the payload or the headers smaller, or raise the topic's max_payload_bytes"

    def __str__(self) -> str:
        """Return the error in words, with what to do about it, as HTTP and the command line say it."""
        return explain(self)


class Throttled(TimelineError):
    """The broker is at a bound; nothing happened. `retry_after_ms` says how long to wait."""

    code = "THROTTLED"
    retryable = True
    advice = "the broker is at a bound: send again after retry_after_ms"


class Expired(TimelineError):
    """The message reached its expiry, or was released to a time at or after it, and was removed."""

    code = "EXPIRED"
    advice = "the message reached its expiry, or was released to a time at or after it, and is gone"


class Dead(TimelineError):
    """The message is a dead letter."""

    code = "DEAD"
    advice = "the message is a dead letter: revive or purge it"


class Unavailable(TimelineError):
    """Nothing happened; the call may be repeated."""

    code = "UNAVAILABLE"
    retryable = True
    advice = "nothing happened: try again"


class Unknown(TimelineError):
    """The call may or may not have happened (the answer was lost)."""

    code = "UNKNOWN"
    retryable = True
    advice = f"it may or may not have happened: {REPEAT}"


class Superseded(TimelineError):
    """Another session took this consumer id over; this one must not reconnect."""

    code = "SUPERSEDED"
    advice = "another consumer connected under the same id: give each consumer an id of its own"


class LeaseLost(TimelineError):
    """The lease ended before the call; somebody else may have the message."""

    code = "LEASE_LOST"
    advice = "the lease has ended: extend earlier or ask for a longer lease"


class Closed(TimelineError):
    """The client, producer or consumer was closed."""

    code = "CLOSED"
    advice = "it was closed: open a new one"


_CHANGED_SINCE = "it stands at another version: somebody leased, moved or released it since; read again, decide again"
_ALIVE = "it is no dead letter: tl.get(topic, id) says where it is"
ADVICE_OF_CALLS: dict[tuple[str, str], str] = {
    ("cancel", Leased.code): f"{Leased.advice}, or cancel with leased=True",
    ("cancel", Fenced.code): _CHANGED_SINCE,
    ("move", Fenced.code): _CHANGED_SINCE,
    ("purge", Exists.code): _ALIVE,
    ("revive", Exists.code): _ALIVE,
}
"""By call and code: the advice for an error if it differs from that of its class."""


def explain(error: TimelineError) -> str:
    """Return the error in one line: its code, its id, and the sentence. The command line prints it."""
    about = f" {error.id!r}" if error.id is not None else ""
    code = "" if isinstance(error, Invalid) else f"{error.code}{about}: "
    return f"{code}{sentence_of(error)}"


def sentence_of(error: TimelineError) -> str:
    """Return what happened and what to do about it, in one line. HTTP answers with it."""
    reason, advice = error.reason, error.advice
    # The advice of these is about a message. Without an id they are about a topic, a schedule or a call. A reason of
    # NOT_FOUND says itself what is not there: perhaps the topic.
    unfit = (error.id is None and isinstance(error, Exists | Fenced)) or isinstance(error, NotFound)
    # The reason of FORBIDDEN names the missing right. Its advice is for another group's message, which has no reason.
    if reason and advice not in ("", reason) and not (unfit or error.lasting or isinstance(error, Invalid | Forbidden)):
        # A reason of UNKNOWN already says that it may or may not have happened.
        said = f"{reason.removesuffix('.')}; {REPEAT if advice == Unknown.advice else advice}"
    else:
        said = reason or advice
    return said.replace("\n", " ")
