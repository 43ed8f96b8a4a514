"""What a run of seeds must have met: answers of every kind, and every fault."""

from __future__ import annotations

from collections import Counter

STATUSES: dict[str, tuple[str, ...]] = {
    "put": (
        "OK", "DUPLICATE", "EXISTS", "INVALID", "TOO_LARGE", "LEASED", "DEAD", "FORBIDDEN", "UNKNOWN", "UNAVAILABLE",
        "THROTTLED",
    ),
    "move": (
        "OK", "NOT_FOUND", "LEASED", "DEAD", "FORBIDDEN", "FENCED", "INVALID", "UNKNOWN", "UNAVAILABLE",
    ),
    "cancel": (
        "OK", "NOT_FOUND", "LEASED", "DEAD", "FORBIDDEN", "FENCED", "EXPIRED", "UNKNOWN", "UNAVAILABLE",
    ),
    "revive": ("OK", "NOT_FOUND", "EXISTS", "FORBIDDEN", "LEASED", "INVALID", "UNKNOWN", "UNAVAILABLE"),
    "purge": ("OK", "NOT_FOUND", "EXISTS", "FORBIDDEN", "LEASED", "UNKNOWN", "UNAVAILABLE"),
    "move_tag": ("OK", "UNKNOWN", "UNAVAILABLE"),
    "cancel_tag": ("OK", "UNKNOWN", "UNAVAILABLE"),
    "ack": ("OK", "NOT_FOUND", "FENCED", "DEAD", "UNKNOWN", "UNAVAILABLE"),
    "extend": ("OK", "NOT_FOUND", "FENCED", "LEASE_LOST", "UNKNOWN", "UNAVAILABLE"),
    "release": ("OK", "NOT_FOUND", "FENCED", "EXPIRED", "UNAVAILABLE"),
    "bury": ("OK", "NOT_FOUND", "FENCED"),
    "get": ("OK", "NOT_FOUND", "UNKNOWN", "UNAVAILABLE"),
    "topic": ("OK", "UNKNOWN", "UNAVAILABLE"),
}  # fmt: skip
FAULTS = (
    "crash", "drain", "pause broker", "crash consumer", "pause consumer", "supersede", "crash producer", "bad wire",
    "one-way cut", "bad store", "store down", "slow store", "clock step", "connection cut", "answer lost on the wire",
    "call repeated by the wire", "call out of time", "store refused", "store call lost", "store answer lost",
    "consumer ended: SUPERSEDED", "wrong membership", "put throttled", "settle throttled", "call throttled",
    "bad events", "etcd down", "etcd cut", "etcd emptied", "ghost", "deaf peers", "event lost", "hint lost",
    "broker's lease ran out", "expired id put again", "message replaced", "message taken", "settled elsewhere",
    "crash puller", "crash between take and settle",
)  # fmt: skip


WIDE, WIDEST = 150, 1_000
"""So many seeds reach everything that can be reached, but for what is RARE; and so many that, too. Of 400 seeds each of
the others was met by 20 at least, what is rare by three to nine."""
RARE = frozenset(
    ("put THROTTLED", "get UNKNOWN", "extend FENCED", "release UNAVAILABLE", "move_tag UNKNOWN", "cancel_tag UNKNOWN")
)


def missing(statuses: Counter[tuple[str, str]], occurred: Counter[str], seeds: int) -> list[str]:
    """What `seeds` seeds must have met and never did."""
    if seeds < WIDE:
        return []
    met = {f"{operation} {status}" for (operation, status), times in statuses.items() if times}
    met |= {fault for fault, times in occurred.items() if times}
    wanted = [f"{operation} {status}" for operation, answers in STATUSES.items() for status in answers]
    return [what for what in (*wanted, *FAULTS) if what not in met and (seeds >= WIDEST or what not in RARE)]


def table(statuses: Counter[tuple[str, str]], occurred: Counter[str]) -> str:
    """How often each answer and each fault occurred, for people."""
    lines = []
    for operation in sorted({operation for operation, _ in statuses}):
        counted = sorted((count, status) for (name, status), count in statuses.items() if name == operation)
        lines.append(f"{operation:>12}  " + "  ".join(f"{status} {count}" for count, status in reversed(counted)))
    lines.append("      faults  " + ", ".join(f"{what} {count}" for what, count in sorted(occurred.items())))
    return "\n".join(lines)
