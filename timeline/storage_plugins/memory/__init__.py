"""`memory://`: the store that keeps everything in this process.

`store.py` is the store. `rows.py` has a topic's messages in columns, and what is due when. `changes.py` and `walks.py`
are the calls.
"""

from timeline.storage_plugins.memory.store import MemoryStore

__all__ = ["MemoryStore"]
