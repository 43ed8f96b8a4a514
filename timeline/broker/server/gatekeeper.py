"""The gatekeeper identifies callers by the token in a call's metadata, before anything else of the call is read.

It reads the file of tokens again when that has changed. Callers must leave if their token is gone, has expired, or has
other rights now. A file that cannot be read while the broker runs changes nothing: a typing error must not lock
everybody out, nor let anybody in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.server.tokens import NOBODY, TokenRecord, id_of, read_tokens
from timeline.credentials import AS_OPERATOR, AUTHORIZATION
from timeline.files import Reloaded
from timeline.metrics import Metrics
from timeline.wire import Fault, TransportError

log = logging.getLogger("timeline.broker")

LOOK_EVERY_S = 0.5
"""How often the file is read again. After it a revoked token opens nothing, and its streams end."""
BEARER = "Bearer "
NO_TOKEN = "this broker wants a token: give token=… in Python, --token-file or TIMELINE_TOKEN_FILE in a shell"
NOT_A_TOKEN = "what came as a token is none: it begins with timeline_ and is as long as when it was created"
UNKNOWN_TOKEN = "this token is not known here: it was never created, or has been revoked"


class Expelled(TransportError):
    """Ends a long call in its middle. Its last request may have happened. The caller is judged again if it
    comes back."""

    def __init__(self, reason: str) -> None:
        super().__init__(Fault.BROKEN, reason)


@dataclass(eq=False, slots=True)
class _Guest:
    """A long call that is being served. `why`: why it has to end, once it has."""

    caller: Principal
    task: asyncio.Task[object]
    why: str = ""


class Gatekeeper:
    """Identifies callers by the tokens in the file at `path`. An empty path accepts everybody, as ANYBODY. `now_ms`:
    the time in ms UTC. Raise Invalid if the file cannot be read or is none."""

    def __init__(self, path: str, now_ms: Callable[[], int], metrics: Metrics) -> None:
        self._now_ms, self._metrics = now_ms, metrics
        self._guests: set[_Guest] = set()
        self._refused: dict[str, int] = {}
        self._last_refused = ""
        read = partial(read_tokens, Path(path))
        self._file = Reloaded("the tokens stay as they were", [path], read, log) if path else None
        self._take(self._file.value if self._file is not None else {})

    def _take(self, entries: dict[str, TokenRecord]) -> None:
        self._entries = entries
        # A caller for each token, and one as an operator, so that calls make none.
        self._callers = {
            (entry.id, as_operator): replace(entry.bearer, as_operator=as_operator)
            for entry in entries.values()
            for as_operator in (False, True)
        }

    def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Principal:
        """Return the caller of `method` by its metadata. Raise TransportError: UNAUTHENTICATED without a valid token,
        FORBIDDEN if its bearer may not call this at all."""
        authorization, as_operator = "", False
        for key, value in metadata or ():
            if key == AUTHORIZATION:
                authorization = value if isinstance(value, str) else value.decode("ascii", "replace")
            elif key == AS_OPERATOR:
                as_operator = True
        if self._file is None:
            return replace(ANYBODY, as_operator=True) if as_operator else ANYBODY
        caller = self._callers[self._known(authorization), as_operator]
        why = caller.call_refusal(method)
        if why:
            raise self._refusal("right", Fault.FORBIDDEN, why)
        return caller

    def _known(self, authorization: str) -> str:
        """Return the id of the token in `authorization`."""
        if not authorization.startswith(BEARER):
            raise self._refusal("no token", Fault.UNAUTHENTICATED, NO_TOKEN)
        token = authorization[len(BEARER) :]
        id = id_of(token)
        if not id:
            raise self._refusal("no token", Fault.UNAUTHENTICATED, NOT_A_TOKEN)
        entry = self._entries.get(id, NOBODY)
        if not entry.is_shown(token):
            raise self._refusal("unknown token", Fault.UNAUTHENTICATED, UNKNOWN_TOKEN)
        if 0 < entry.expires_ms <= self._now_ms():
            raise self._refusal("expired token", Fault.UNAUTHENTICATED, _expired(entry))
        return entry.id

    def _refusal(self, cause: str, fault: Fault, why: str) -> TransportError:
        self._metrics.count("timeline_access_refused_total", cause)
        self._refused[cause] = self._refused.get(cause, 0) + 1
        return TransportError(fault, why)

    def refused_to(self, peer: str) -> None:
        """Note the last refused peer, for the log."""
        self._last_refused = peer

    @contextmanager
    def serving(self, caller: Principal) -> Iterator[None]:
        """Let the current task serve `caller` meanwhile. Raise Expelled in it when the caller has to leave."""
        task = asyncio.current_task()
        if caller.open or task is None:
            yield
            return
        guest = _Guest(caller, task)
        self._guests.add(guest)
        try:
            yield
        except asyncio.CancelledError:
            if not guest.why:
                raise
            task.uncancel()
            raise Expelled(guest.why) from None
        finally:
            self._guests.discard(guest)

    def look(self) -> None:
        """Read the file again if it has changed, expel callers that may not stay, and log refusals."""
        if self._file is not None:
            before = self._entries.keys()
            if self._file.look():
                self._take(self._file.value)
                now = self._entries.keys()
                new, gone = len(now - before), len(before - now)
                log.info("the tokens were read again: %d, %d of them new, %d gone", len(now), new, gone)
            self._expel()
        if self._refused:
            causes = ", ".join(
                f"{count} with {'no right' if cause == 'right' else cause}"
                for cause, count in sorted(self._refused.items())
            )
            log.warning("calls were refused: %s; the last one from %s", causes, self._last_refused or "somewhere")
            self._refused.clear()

    def _expel(self) -> None:
        now_ms = self._now_ms()
        for guest in self._guests:
            if not guest.why and (why := self._leaves(guest.caller, now_ms)):
                guest.why = why
                guest.task.cancel()

    def _leaves(self, caller: Principal, now_ms: int) -> str:
        """Return why `caller` has to leave. Empty: it may stay."""
        entry = self._entries.get(caller.token)
        if entry is None:
            self._metrics.count("timeline_access_refused_total", "revoked token")
            return f"{caller!s} has been revoked"
        if 0 < entry.expires_ms <= now_ms:
            self._metrics.count("timeline_access_refused_total", "expired token")
            return _expired(entry)
        if entry.bearer != caller:
            return f"the rights of {caller!s} have changed: connect again"
        return ""


def _expired(entry: TokenRecord) -> str:
    return f"token {entry.name!r} has expired: create another with 'timeline token create'"
