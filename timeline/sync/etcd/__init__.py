"""`etcd://`: brokers find each other through etcd.

`membership` implements the contract on the event loop, and has the thread that joins and talks to etcd. `client` is one
member of etcd through `etcd3`, at the place that a URL names. `records` has keys, values and a snapshot of them.
"""

from timeline.sync.etcd.membership import EtcdMembership

__all__ = ["EtcdMembership"]
