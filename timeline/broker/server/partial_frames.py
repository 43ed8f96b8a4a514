"""What connections have brought of frames that are not whole yet, and an end for those that bring too much of it.

gRPC keeps what arrives of a frame until it is whole, up to the largest frame for each call, and bounds each call alone:
a bound over all of them (its resource quota) is not to be had from Python. Some dozens of calls, each with a part of a
large frame, would take gigabytes, and nobody would ever see them. So what the kernel counts as received on each
connection is held against the frames that came out of it.

That is the most which can be here: what gRPC has thrown away since, of calls that were turned away or broken off,
counts until the connection ends. So those with most are not always to blame; they connect again.

Linux only.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from timeline.broker.fairness.limits import MIB

log = logging.getLogger("timeline.broker")

UNFINISHED_EVERY_S = 0.25
"""Between two looks."""
GROWN_BYTES = 128 * MIB
"""Connections are looked at, which takes some microseconds for each, only when the process has grown by so much."""
FDS = Path("/proc/self/fd")
CALL_BYTES, FRAME_BYTES, SEGMENT_BYTES = 256, 64, 64
"""What a call of one frame, a frame of a stream, and a segment of TCP may bring besides: headers, pings, windows."""
SEGMENTS_BYTES = 16 * MIB
"""No more for all segments of a connection: who cuts what he sends small enough would never be seen."""
_INFO_BYTES, _STATE_AT, _RECEIVED_AT, _SEGMENTS_AT = 156, 0, 128, 152
"""Of Linux's `struct tcp_info`: its size as far as it is read, `tcpi_state`, `tcpi_bytes_received` and
`tcpi_data_segs_in` in it."""
_OPEN = (1, 8)
"""TCP_ESTABLISHED, and TCP_CLOSE_WAIT: those that we have not ended ourselves."""

Place: TypeAlias = tuple[str, int]
"""Address and port of a peer; IPv4 as such, also where it came through a socket for both."""


def resident_bytes() -> int:
    """What this process takes of the machine's memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Unfinished:
    """Of one broker. `ports`: its own. `most_bytes`: what may be unfinished in all. `resident`: what tells how large
    the process is."""

    def __init__(self, ports: set[int], most_bytes: int, resident: Callable[[], int] = resident_bytes) -> None:
        self._ports, self._most_bytes, self._resident = ports, most_bytes, resident
        self._whole: dict[str, int] = {}
        """Bytes of whole frames and of what comes with them, by peer as gRPC names it."""
        self._seen_bytes = resident()

    def whole(self, peer: str, bytes_: int, besides: int = FRAME_BYTES) -> None:
        """A whole frame came from `peer`."""
        self._whole[peer] = self._whole.get(peer, 0) + bytes_ + besides

    def look(self) -> int:
        """Hangs up on those with most, where all together have too much; answers on how many."""
        now_bytes = self._resident()
        if now_bytes < self._seen_bytes + GROWN_BYTES:
            self._seen_bytes = min(self._seen_bytes, now_bytes)
            return 0
        with _connections(self._ports) as found:
            ended = self._hang_up(found)
        self._seen_bytes = now_bytes
        return ended

    def _hang_up(self, found: dict[Place, socket.socket]) -> int:
        peers = {_place(peer): peer for peer in self._whole}
        self._whole = {peer: self._whole[peer] for place, peer in peers.items() if place in found}
        unfinished = []
        for place, connection in found.items():
            missing = _received(connection) - self._whole.get(peers.get(place, ""), 0)
            if missing > 0:
                unfinished.append((missing, place))
        unfinished.sort()
        left = sum(missing for missing, _ in unfinished)
        ended = 0
        while left > self._most_bytes // 2 and (ended or left > self._most_bytes):
            missing, place = unfinished.pop()
            log.warning(
                "hung up on %s: of the frames it began %.1f MiB are here and none of them whole; %.1f MiB in all",
                "{}:{}".format(*place),
                missing / MIB,
                left / MIB,
            )
            with suppress(OSError):  # it has gone by itself
                found[place].shutdown(socket.SHUT_RDWR)
            left -= missing
            ended += 1
        return ended


@contextmanager
def _connections(ports: set[int]) -> Iterator[dict[Place, socket.socket]]:
    """The connections to `ports` of this process, each by a descriptor of ours: gRPC keeps its own."""
    found: dict[Place, socket.socket] = {}
    try:
        for name in os.listdir(FDS):
            try:
                if not os.readlink(FDS / name).startswith("socket:"):
                    continue
                mine = _socket_of(os.dup(int(name)))
            except OSError:
                continue  # closed meanwhile
            place = _peer_of(mine, ports)
            if place is None or place in found:
                mine.close()
            else:
                found[place] = mine
        yield found
    finally:
        for mine in found.values():
            mine.close()


def _socket_of(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _peer_of(mine: socket.socket, ports: set[int]) -> Place | None:
    """Who is at the other end; None where this is none of the broker's connections."""
    if mine.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        if mine.getsockname()[1] not in ports:
            return None
        host, port = mine.getpeername()[:2]
    except OSError:
        return None  # it listens, or is over
    return _plain(host), port


def _place(peer: str) -> Place:
    """Of a peer as gRPC names it, such as ipv4:127.0.0.1:80 or ipv6:%5B::1%5D:80."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _received(connection: socket.socket) -> int:
    """Bytes that came over it so far, without what each segment may carry besides frames; 0 once it was hung up on,
    though gRPC has it a moment longer."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:  # a Linux before 4.6
        return 0
    if info[_STATE_AT] not in _OPEN:
        return 0
    (received,), (segments,) = (
        struct.unpack_from("=Q", info, _RECEIVED_AT),
        struct.unpack_from("=I", info, _SEGMENTS_AT),
    )
    return int(received) - min(SEGMENT_BYTES * int(segments), SEGMENTS_BYTES)
