"""The company of Timeline in a measurement: other services, the bare store, bare gRPC.

A peer's processes talk to the benchmark by lines. READY: it can begin. `asked_line` makes a line of payloads to put,
which is answered by STORED. LEFT asks how many are not acknowledged. DROP removes all, and is answered by DROPPED.
"""

from __future__ import annotations

import json
import os

READY, STORED, LEFT, DROP, DROPPED = "ready", "stored", "left", "drop", "dropped"


def asked_line(payloads: list[str], due_ms: list[int] | None = None) -> str:
    """Return a line that puts payloads with due times of their own. None: they are due at once."""
    return json.dumps([payloads, due_ms])


def asked_of(line: str) -> tuple[list[str], list[int] | None]:
    """Return the payloads and the due times of such a line."""
    payloads, due_ms = json.loads(line)
    return payloads, due_ms


def id_output() -> int:
    """Return the file to which a peer's process writes its ids: what was its standard output.

    From then on its standard output is its standard error, for what the peer prints by itself.
    """
    ids = os.dup(1)
    os.dup2(2, 1)
    return ids
