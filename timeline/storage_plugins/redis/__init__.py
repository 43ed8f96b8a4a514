"""`redis://`: the store on Redis 7 or later, a single server or a cluster.

A topic's bucket is a handful of keys under one hash tag. So one script changes them atomically wherever they are.
`records.py` has the packed form of a message, and `scripts.py` what the server does. `changes.py` decides a call and
writes by compare-and-set; `leasing.py` and `reading.py` have the other calls. `server.py` asks the servers and reads
their settings. `store.py` has the records of topics and of the store.
"""

from timeline.storage_plugins.redis.store import RedisStore

__all__ = ["RedisStore"]
