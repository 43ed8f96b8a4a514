"""`mysql://user:password@host/database`: MariaDB from 10.6 and MySQL from 8.0, shared by any number of brokers."""

from timeline.storage_plugins.mysql.store import MysqlStore

__all__ = ["MysqlStore"]
