"""The rules: what may be asked of a message in which state, by whom, and what then becomes of it. Pure.

`table.py` is the one table (state, operation, caller) → effect or status; `dealing.py` is round-robin by credit.
Stores express these rules in their own way (columns, SQL, Lua); they call `decide` for whatever their fast path does
not take, and the conformance suite holds every store to this table.
"""

from timeline.leases.dealing import deal
from timeline.leases.table import Ask, Decision, Message, decide, state_of

__all__ = ["Ask", "Decision", "Message", "deal", "decide", "state_of"]
