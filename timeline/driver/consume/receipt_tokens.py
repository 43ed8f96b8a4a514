"""Receipts: a lease as a short text, for callers that keep no consumer.

A receipt names the topic, the holder, and the token of one delivery. It works in any process and at any broker. It is
base64url without padding, and ends with a checksum. It is no secret to its bearer, and opaque: read it here alone.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from itertools import accumulate
from typing import NamedTuple

from timeline.driver.times import shown
from timeline.errors import Invalid
from timeline.model import MAX_HOLDER_BYTES, MAX_ID_BYTES, MAX_TOPIC_CHARS, check_topic_name

FORMAT = 1
_HEAD = struct.Struct("<BHBBQq")
"""Format, bytes of topic, of holder and of id, birth, version. Then topic, holder and id."""
_SUM = struct.Struct("<I")
MAX_TOPIC_BYTES = 4 * MAX_TOPIC_CHARS
MAX_TEXT = 4 * (_HEAD.size + MAX_TOPIC_BYTES + MAX_HOLDER_BYTES + MAX_ID_BYTES + _SUM.size) // 3 + 4
NO_RECEIPT = "this is no receipt: it is damaged or cut off. Give it as it came with the delivery (d.receipt)"


class LeaseToken(NamedTuple):
    """The lease of one delivery."""

    topic: str
    holder: str
    id: bytes
    birth: int
    version: int

    def receipt(self) -> str:
        """Return it as a receipt."""
        topic, holder = self.topic.encode(), self.holder.encode()
        head = _HEAD.pack(FORMAT, len(topic), len(holder), len(self.id), self.birth, self.version)
        body = head + topic + holder + self.id
        return base64.urlsafe_b64encode(body + _SUM.pack(zlib.crc32(body))).decode().rstrip("=")

    @classmethod
    def of(cls, receipt: object) -> LeaseToken:
        """Return the lease that a receipt names. Raise Invalid for anything else."""
        if not isinstance(receipt, str):
            raise Invalid(f"a receipt is a text, as d.receipt gives it, not {shown(receipt)}")
        text = receipt.strip()
        if not 0 < len(text) <= MAX_TEXT:
            raise Invalid(NO_RECEIPT)
        try:
            body = _verified(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
            form, *sizes, birth, version = _HEAD.unpack_from(body)
            if form != FORMAT or _HEAD.size + sum(sizes) != len(body):
                raise Invalid(NO_RECEIPT)
            topic, holder, id = _cut(body[_HEAD.size :], sizes)
            # A broker refuses a whole frame for what no lease has. The good receipts beside it would fail as well.
            if not _named(holder) or not _named(id) or version < 1:
                raise Invalid(NO_RECEIPT)
            return cls(check_topic_name(topic.decode()), holder.decode(), id, birth, version)
        except (binascii.Error, struct.error, ValueError, Invalid) as bad:
            raise Invalid(NO_RECEIPT) from bad


def _verified(data: bytes) -> bytes:
    """Return `data` without its checksum. Raise Invalid if that is wrong."""
    body, (checksum,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if checksum != zlib.crc32(body):
        raise Invalid(NO_RECEIPT)
    return body


def _named(text: bytes) -> bool:
    """Return whether `text` may be an id or a holder. Raise UnicodeDecodeError if it is not UTF-8."""
    return bool(text) and "\0" not in text.decode()


def _cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Return the parts of `data` that have these sizes."""
    ends = list(accumulate(sizes))
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
