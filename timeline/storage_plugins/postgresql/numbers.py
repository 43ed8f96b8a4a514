"""Row numbers: taken from the server's sequence in blocks, so that a put costs no statement for them."""

from __future__ import annotations

from timeline.storage_plugins.postgresql.connections import Connection
from timeline.storage_plugins.postgresql.schema import ROWS_AT_A_TIME

BLOCKS = 16
_BLOCKS = "SELECT array_agg(nextval('timeline.message_row')) FROM generate_series(1, $1::int8)"


class Numbers:
    """Numbers that no other broker has."""

    def __init__(self) -> None:
        self._ranges: list[range] = []

    async def take(self, connection: Connection, count: int) -> list[int]:
        """`count` of them, each used once."""
        if sum(map(len, self._ranges)) < count:
            firsts = await connection.fetchval(_BLOCKS, BLOCKS + -(-count // ROWS_AT_A_TIME))
            self._ranges += [range(first, first + ROWS_AT_A_TIME) for first in firsts]
        taken: list[int] = []
        while len(taken) < count:
            block = self._ranges[0]
            part = block[: count - len(taken)]
            taken += part
            self._ranges[0] = block[len(part) :]
            if not self._ranges[0]:
                del self._ranges[0]
        return taken

    def forget(self) -> None:
        """Takes new ones: a server that lost its last moments in a crash may hand these out again."""
        self._ranges.clear()
