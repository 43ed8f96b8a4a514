"""`memory://`: the store that keeps everything in this process.

`store.py` is the store; `rows.py` a topic's messages in columns, made of what `growing.py` has; `agenda.py` what is due
when; `changes.py`, `leasing.py` and `walks.py` the calls.
"""

from timeline.storage_plugins.memory.store import MemoryStore

__all__ = ["MemoryStore"]
