"""The company of Timeline in a measurement: other services, the bare store, bare gRPC.

A peer's processes talk to the benchmark by lines. READY: it can begin. A list of payloads as JSON is put, and answered
by STORED. LEFT asks how many are not acknowledged. DROP removes all, and is answered by DROPPED.
"""

from __future__ import annotations

import os

READY, STORED, LEFT, DROP, DROPPED = "ready", "stored", "left", "drop", "dropped"


def id_output() -> int:
    """Return the file to which a peer's process writes its ids: what was its standard output.

    From then on its standard output is its standard error, for what the peer prints by itself.
    """
    ids = os.dup(1)
    os.dup2(2, 1)
    return ids
