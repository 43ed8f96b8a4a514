"""`redis://`: the store on Redis 7 or later, a single server or a cluster.

A topic's bucket is a handful of keys under one hash tag, so that one script changes them atomically wherever they are:
`records.py` says what a message looks like there, `scripts.py` what the server does, `changes.py` how a call decides
and writes by compare-and-set, `leasing.py` and `reading.py` the other calls, `server.py` who is asked and what its
settings promise, `schema.py` the records of topics and of the store.
"""

from timeline.storage_plugins.redis.store import RedisStore

__all__ = ["RedisStore"]
