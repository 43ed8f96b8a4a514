"""`memory://`: the store that keeps everything in this process.

`store.py` is the store; `rows.py` a topic's messages in columns; `agenda.py` what is due when; `names.py` groups, tags
and holders as numbers; `puts.py leasing.py settles.py mutations.py walks.py sweeping.py` the calls; `rulings.py` a
message at a time by the table of `timeline.leases`.
"""

from timeline.storage_plugins.memory.store import MemoryStore

__all__ = ["MemoryStore"]
