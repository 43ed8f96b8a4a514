"""Whether a port can be had, and if not, in the system's words why."""

from __future__ import annotations

import socket

from timeline.config import split_address


def check_free(listen: str) -> None:
    """Raises OSError with the system's reason, its `filename` `listen`, when nobody could listen there now. Port 0 is
    always free."""
    host, port = split_address(listen)
    try:
        kind, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind(address)
            asked.listen(1)
    except OSError as taken:
        raise OSError(taken.errno, taken.strerror, listen) from taken
