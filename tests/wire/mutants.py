"""Frames gone bad, by seed: good frames with bits flipped, bytes put in, taken out or written over, offsets led astray,
and plain noise."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

from tests.wire.samples import SAMPLES, produce, settle
from timeline.wire import encode

NASTY = [0, 1, 2, 3, 4, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 0xFFFF_FFF8, 0x1000_0000]


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def write_bytes(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 2, 5])):
        data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xC3, 0xFF, chance.randrange(256)])


def put_in(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.randbytes(chance.choice([1, 2, 4, 8, 100]))


def take_out(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice([1, 2, 4, 8, 30])]


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def lead_astray(data: bytearray, chance: random.Random) -> None:
    """An offset or a length, which are 4 bytes and aligned, becomes something else."""
    for _ in range(chance.choice([1, 1, 2])):
        at = chance.randrange(0, len(data) - 3, 4)
        value = chance.choice([*NASTY, len(data), len(data) - at, chance.randrange(2 * len(data))])
        data[at : at + 4] = struct.pack("<I", value & 0xFFFF_FFFF)


def shift_offset(data: bytearray, chance: random.Random) -> None:
    """An offset or a length a little larger or smaller: vectors overlap, tables alias."""
    at = chance.randrange(0, len(data) - 3, 4)
    (value,) = struct.unpack_from("<I", data, at)
    data[at : at + 4] = struct.pack("<I", (value + chance.choice([-8, -4, -2, -1, 1, 2, 4, 8])) & 0xFFFF_FFFF)


def write_short(data: bytearray, chance: random.Random) -> None:
    """A vtable's entries are 2 bytes."""
    at = chance.randrange(0, min(len(data), 120) - 1, 2)
    data[at : at + 2] = struct.pack("<H", chance.choice([0, 1, 4, 5, 6, 8, 12, 16, 64, 0x7FFF, 0x8000, 0xFFFF]))


def copy_within(data: bytearray, chance: random.Random) -> None:
    size = chance.choice([4, 8, 16])
    source, target = chance.randrange(len(data)), chance.randrange(len(data))
    piece = data[source : source + size]
    data[target : target + len(piece)] = piece


def write_number(data: bytearray, chance: random.Random) -> None:
    """A number of 8 bytes out of its range."""
    at = chance.randrange(4, max(5, len(data) - 8), 4)
    value = chance.choice([-1, 0, 2**63 - 1, -(2**63), 253_402_300_800_000, 2**53, 3_162_240_000_001])
    data[at : at + 8] = struct.pack("<q", value)


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    flip_bits,
    write_bytes,
    put_in,
    take_out,
    truncate,
    lead_astray,
    shift_offset,
    write_short,
    copy_within,
    write_number,
]


def good_frames() -> list[bytes]:
    """The seeds: every sample, and batches that take the ways of long columns."""
    return [encode(frame) for frame in (*SAMPLES, produce(50), settle(50))]


def mutants(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` bad frames, each with a name that tells how it was made: every good frame in turn, changed once to
    thrice, and every twentieth nothing but noise."""
    chance = random.Random(seed)
    good = good_frames()
    for index in range(count):
        if index % 20 == 0:
            noise = chance.randbytes(chance.choice([0, 3, 12, 64, 500]))
            yield f"noise {seed}/{index}", noise if index % 40 else b"\x14\0\0\0TLN1" + noise
            continue
        data = bytearray(good[index % len(good)])
        steps = [chance.choice(MUTATIONS) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
        for step in steps:
            if len(data) >= 12:
                step(data, chance)
        yield f"{seed}/{index} of {index % len(good)}: {', '.join(step.__name__ for step in steps)}", bytes(data)
