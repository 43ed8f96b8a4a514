"""A Redis Cluster of three masters, three processes on free ports, made by `redis-cli --cluster create`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers.process import Server, free_port
from tests.servers.redis import RedisServer

NODES = 3
FORM_S = 60.0


class _Node(RedisServer):
    """One of its processes. The bus has a port of its own, as the usual one, 10,000 above, may be beyond the last."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.settings = (
            *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
            *("--cluster-node-timeout", "2000"),
        )


class RedisClusterServer(Server):
    """The whole cluster. `process` is its first node's."""

    name = "redis_cluster"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.nodes = [_Node(folder / f"node-{number}") for number in range(NODES)]
        self._formed = False

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def command(self) -> Sequence[str]:
        return self.nodes[0].command

    def ready(self) -> bool:
        return all(_asked(node.port, b"CLUSTER INFO", b"cluster_state:ok") for node in self.nodes)

    def start(self) -> Self:
        for node in self.nodes:
            if node.process is None or node.process.poll() is not None:
                node.start()
        self.process = self.nodes[0].process
        if not self._formed:
            addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
            self.run("redis-cli", "--cluster", "create", *addresses, "--cluster-yes")
            self._formed = True
        for _ in range(int(FORM_S / 0.05)):
            if self.ready():
                return self
            self._ended(0.05)
        raise RuntimeError(f"{self.name} did not form: {self.nodes[0].last_words()}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def _asked(port: int, command: bytes, wanted: bytes) -> bool:
    """Whether the answer to a command has `wanted` in it."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as asked:
            asked.sendall(command + b"\r\n")
            return wanted in asked.recv(4096)
    except OSError:
        return False


__all__ = ["RedisClusterServer"]
