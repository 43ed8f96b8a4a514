"""Idempotency-Key: how a repeat of a request is recognised without any memory in the gateway.

The store recognises a repeated put by its birth, and a repeated change by its operation id. With a key, both follow
from the key and the request. So the same request gets the same numbers at every gateway. Without a key they are random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

KEYED = frozenset(("putMessages", "moveMessage", "cancelMessage", "moveTag", "releaseLeases", "reviveDeadLetters"))
"""Calls, by their operation id of OpenAPI, that read the key. The texts of all writing calls say what a repeat does."""


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """The key of one request, empty without one. `topic`: the topic of the call, empty where it names none."""

    key: str
    topic: str = ""

    def __bool__(self) -> bool:
        return bool(self.key)

    def _digest(self, *parts: object) -> bytes:
        said = "\0".join((str(parts[0]), self.topic, *map(str, parts[1:]), self.key))
        return hashlib.blake2b(said.encode("utf-8", "surrogateescape"), digest_size=16).digest()

    def birth(self, place: int, payload: bytes, *asked: object) -> int:
        """Return the birth of the message at `place` of the request. `asked`: what else the message has. So the key
        with another message is no repeat."""
        content = hashlib.blake2b(payload, digest_size=16).hexdigest()
        return int.from_bytes(self._digest("birth", place, content, *map(repr, asked))[:8]) or 1

    def id(self, place: int) -> str | None:
        """Return the id of the message at `place`, if it has none. None without a key: the driver makes one."""
        if not self.key:
            return None
        made = self._digest("id", place).hex()
        return f"{made[:8]}-{made[8:12]}-8{made[13:16]}-8{made[17:20]}-{made[20:]}"

    def operation(self, call: str, *asked: object) -> int | None:
        """Return the operation id of a change. `asked`: what the request asks for, so that the key with another request
        is another change. None without a key: the driver draws one."""
        if not self.key:
            return None
        return int.from_bytes(self._digest("operation", call, *map(repr, asked))[:8]) or 1

    def operations(self, call: str, ids: Iterable[str], *asked: object) -> list[int] | None:
        """Return an operation id for each of `ids`; see `operation`."""
        if not self.key:
            return None
        return [self.operation(call, id, *asked) or 1 for id in ids]
