"""The rules of a message's life, as pure functions.

`table` decides about one message, `dealing` deals messages out to consumers. Stores express these rules in their own
way: columns, SQL, Lua. They call `decide` for messages that their fast path does not take. The conformance suite holds
every store to this table.
"""

from timeline.leases.dealing import deal
from timeline.leases.table import Ask, Decision, Message, decide, state_of

__all__ = ["Ask", "Decision", "Message", "deal", "decide", "state_of"]
