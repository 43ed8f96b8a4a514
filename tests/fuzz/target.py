"""What is fuzzed: one input for the decoder, judged by everything that tests/wire knows; and how inputs are changed."""

from __future__ import annotations

import hashlib
import random
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.wire.examination import allowed_bytes, judged, sound
from tests.wire.mutants import MUTATIONS

MAX_CPU_S = 1.0
"""Processor time that one input may cost; the machine may be busy with other things."""
TRACED_SHARE = 8
"""One input in so many has its memory counted, which is slow: always the same ones, so that a failure comes again."""
LEAST_CHANGED_BYTES = 12


class Unbounded(AssertionError):
    """An input that takes too long or too much memory."""


def examine_bounded(data: bytes) -> None:
    """Returns when `data` is refused as documented, or decodes to values in range, within time and memory. Raises
    whatever is wrong otherwise."""
    started_s = time.thread_time()
    result = judged(data)
    took_s = time.thread_time() - started_s
    if took_s > MAX_CPU_S:
        raise Unbounded(f"decoding {len(data)} bytes took {took_s:.2f} s of processor time")
    if zlib.crc32(data) % TRACED_SHARE == 0:
        _count_memory(data)
    if result is not None:
        sound(*result)


def _count_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        judged(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > allowed_bytes(data):
        raise Unbounded(f"decoding {len(data)} bytes allocated {peak} bytes; {allowed_bytes(data)} are allowed")


def changed(data: bytes, most_bytes: int, seed: int, otherwise: Callable[[bytes, int], bytes]) -> bytes:
    """`data` as the next input: changed by somebody who knows where frames are weak, or `otherwise`, blindly."""
    chance = random.Random(seed)
    if len(data) < LEAST_CHANGED_BYTES or chance.random() < 0.5:
        return otherwise(data, most_bytes)
    mutant = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if len(mutant) >= LEAST_CHANGED_BYTES:
            chance.choice(MUTATIONS)(mutant, chance)
    return bytes(mutant[:most_bytes])


def fuzz(atheris: Any, arguments: list[str], failing: Path) -> None:
    """Hands this process over to libFuzzer, which never returns: exit code 0 when its time was up, else something was
    found. `arguments`: libFuzzer's, the name of the program first. An input that fails is kept in the folder
    `failing`."""

    def examine(data: bytes) -> None:
        try:
            examine_bounded(data)
        except BaseException:
            # libFuzzer keeps only what kills the process.
            kept = failing / hashlib.sha1(data).hexdigest()
            kept.write_bytes(data)
            print(f"Test unit written to {kept}", file=sys.stderr)
            raise

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        return changed(data, most_bytes, seed, atheris.Mutate)

    atheris.Setup(arguments, examine, custom_mutator=mutate)
    atheris.Fuzz()
