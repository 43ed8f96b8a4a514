"""`etcd://`: brokers find each other through etcd.

`membership` is the contract's implementation, on the event loop; `session` the thread that talks to etcd, `claim` its
way in, `client` one member of etcd through `etcd3`, `messages` etcd's protocol, `records` keys and values, `picture`
what was read, `url` where all that is.
"""

from timeline.sync.etcd.membership import EtcdMembership

__all__ = ["EtcdMembership"]
