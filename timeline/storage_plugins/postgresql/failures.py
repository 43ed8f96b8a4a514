"""What went wrong with a server or on the way to it, in the contract's words."""

from __future__ import annotations

import errno
import socket

import asyncpg

from timeline.storage_plugins.contract import StoreError, StoreFull, StoreUnavailable, StoreUnknown

_DOUBTFUL = ("08", "40003", "57P01", "57P02", "57P03")
"""Of a commit that ends so nobody knows whether it was done."""
REFUSED = {
    "28P01": "the password is wrong: mend it in the URL, in PGPASSWORD or in ~/.pgpass",
    "28000": "this user may not connect: see the server's pg_hba.conf",
    "3D000": "there is no such database: create it (createdb), or name another one in the URL",
    "42501": "this user lacks rights: it must own the schema, or be allowed to create one in the database",
}
_UNAVAILABLE = {
    "53300": "the server has no connection left: raise its max_connections, or lower pool= in the URLs of the brokers",
    "53200": "the server is out of memory",
    "57P03": "the server starts up, shuts down or recovers",
    "25006": "the server takes no writes (it is a standby, or recovers): give the primary's address, or all hosts",
    "42501": REFUSED["42501"],
}
_FULL, _FREE = "53100", "the server's disk is full: free some space"
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, EOFError)


def sentence(error: BaseException) -> str:
    """What went wrong, without anything of the URL; the driver's own texts name hosts at most."""
    if isinstance(error, TimeoutError):
        return "no answer within the deadline"
    words = " ".join(str(error).split())
    if isinstance(error, socket.gaierror):
        return "this host name is not known"
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in words:
        return "no server listens there"
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


def state_of(error: BaseException) -> str:
    """The server's own code of an error; empty when it is not the server's."""
    return getattr(error, "sqlstate", None) or ""


def unsent(error: BaseException) -> bool:
    """Whether the driver did not even send the statement: the server had said that it ends this idle connection (an
    administrator's word, a shutdown), and its end has not come yet."""
    return isinstance(error, asyncpg.InternalClientError) and "cannot switch to state" in str(error)


def judged(error: BaseException, doubtful: bool) -> StoreError:
    """`error` in the contract's words. `doubtful`: what was sent may have been committed when no answer came."""
    if isinstance(error, StoreError):
        return error
    if unsent(error):
        return StoreUnavailable("the server has ended the connection")
    state = state_of(error)
    said = isinstance(error, asyncpg.PostgresError) and state and not state.startswith(_DOUBTFUL)
    if doubtful and not said:
        return StoreUnknown(sentence(error))
    if state == _FULL:
        return StoreFull(_FREE)
    return StoreUnavailable(_UNAVAILABLE.get(state, sentence(error)))
