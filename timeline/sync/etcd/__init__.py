"""`etcd://`: brokers find each other through etcd.

`membership` implements the contract on the event loop. `session` is the thread that joins and talks to etcd. `client`
is one member of etcd through `etcd3`, `messages` its protocol. `records` has keys, values and a snapshot of them. `url`
says where all that is.
"""

from timeline.sync.etcd.membership import EtcdMembership

__all__ = ["EtcdMembership"]
