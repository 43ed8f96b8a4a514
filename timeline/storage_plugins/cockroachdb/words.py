"""PostgreSQL's statements in CockroachDB's words.

A row is found by its key, since there is no place on disk (`ctid`) to find it by; rows carry their topic's uid itself,
so that a statement need not look a key up before it knows which range of an index it reads; and nothing is locked that
SERIALIZABLE guards anyhow. Rows that another part of a statement names are joined (`IN`), since an array of them
(`ANY`) would be looked for in the whole table. A golden file of the tests has every statement as it is sent.
"""

from __future__ import annotations

import re

from timeline.storage_plugins.postgresql import sweeping
from timeline.storage_plugins.postgresql.connections import Qualified
from timeline.storage_plugins.postgresql.statements import TOPIC

_LIVES = "EXISTS (SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1)"
_REPLACED = (
    (re.compile(rf"= {re.escape(TOPIC)}"), f"= $1 AND {_LIVES}"),
    (re.compile(re.escape(TOPIC)), "$1::INT8"),
    (re.compile(r" FOR KEY SHARE| FOR UPDATE SKIP LOCKED"), ""),
    # Keeps PostgreSQL from joining in its own way, and CockroachDB from joining at all: it would look for each row.
    (re.compile(r"\s+OFFSET 0\b"), ""),
    (re.compile(r"\bctid\b"), "row"),
    # A word of the grammar; in quotes it is a name wherever it stands.
    (re.compile(r'(?<!")\brow\b(?!")'), '"row"'),
    # What an INSERT selects has no type by itself.
    (re.compile(r"\$2, \$2, a\.expires_ms"), "$2::INT8, $2::INT8, a.expires_ms"),
    (re.compile(r"(gone\.left_op|gone\.payload_sum, 0), (\$\d+) FROM gone"), r"\1, \2::INT8 FROM gone"),
    (re.compile(r'WHERE \((b\."row" IN \(SELECT stored\."row" FROM stored\))\) IS TRUE'), r"WHERE \1"),
)
_OWN = {
    sweeping.FORGET: """
DELETE FROM timeline.remembered WHERE topic = $1 AND settled_ms <= $2 AND EXISTS (
  SELECT 1 FROM timeline.topic AS t WHERE t.uid = $1)
ORDER BY settled_ms LIMIT $3
""",
    sweeping.IDS_OF_DROPPED: """
DELETE FROM timeline.remembered WHERE topic = $1 ORDER BY id LIMIT $2
""",
}
_FOREIGN = re.compile(
    r"\bctid\b|SKIP LOCKED|KEY SHARE|int[48]send|string_agg|advisory|to_reg|hashtext|search_path|in_recovery|nextval"
)
"""What CockroachDB does not have, or what this store has no use for."""


def worded(statement: str) -> str:
    """`statement` as CockroachDB is told it. Raises AssertionError for one that has no such words."""
    text = _OWN.get(statement)
    if text is None:
        text = statement
        for pattern, words in _REPLACED:
            text = pattern.sub(words, text)
        text = _joined(text)
    foreign = _FOREIGN.search(text)
    assert foreign is None, f"no words of CockroachDB for {foreign[0]!r} in: {text}"
    return text


def _joined(text: str) -> str:
    """`= ANY(ARRAY(SELECT …))` as `IN (SELECT …)`."""
    while True:
        before, array, rest = text.partition("= ANY(ARRAY(")
        if not array:
            return text
        depth = 1
        for at, sign in enumerate(rest):
            depth += {"(": 1, ")": -1}.get(sign, 0)
            if depth == 0:
                text = f"{before}IN ({rest[:at]}){rest[at + 2 :]}"
                break


class Worded(Qualified):
    """Statements by the text that the PostgreSQL store has for them."""

    def __missing__(self, statement: str) -> str:
        text = self[statement] = self.qualified(worded(statement))
        return text
