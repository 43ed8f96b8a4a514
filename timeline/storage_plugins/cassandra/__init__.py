"""`cassandra://host,host/keyspace`: a store on Apache Cassandra.

A bucket of a topic is one partition, with its messages and every index over them. One conditional batch changes it.
`statements.py` draws the partition, `bucket.py` reads and changes it, and `session.py` talks to the driver.

The driver's package has the name of this one: everything here is imported absolutely.
"""

from timeline.storage_plugins.cassandra.store import CassandraStore

__all__ = ["CassandraStore"]
