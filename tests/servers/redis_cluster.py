"""A Redis Cluster of three masters: three processes on free ports, each told its slots and then of the first."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers.process import Server, free_port
from tests.servers.redis import RedisServer

NODES = 3
SLOTS = 16_384
FORM_S = 90.0
MEET_AGAIN_S = 2.0
LOOK_S = 0.05


class _Node(RedisServer):
    """One of its processes. The bus has a port of its own, as the usual one, 10,000 above, may be beyond the last."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bus_port = free_port()
        self.settings = (
            *("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)),
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
        return all("cluster_state:ok" in _asked(node, "CLUSTER INFO") for node in self.nodes)

    def start(self) -> Self:
        for node in self.nodes:
            node.start()
        self.process = self.nodes[0].process
        if not self._formed:
            self._give_slots()
        for look in range(int(FORM_S / LOOK_S)):
            if not self._formed and look % int(MEET_AGAIN_S / LOOK_S) == 0:
                self._meet()
            if self.ready():
                self._formed = True
                return self
            self._ended(LOOK_S)
        raise RuntimeError(f"{self.name} did not form: {_asked(self.nodes[0], 'CLUSTER NODES')}")

    def _give_slots(self) -> None:
        """Gives each node its share of the slots and a number of its own, as long as it knows no other."""
        for number, node in enumerate(self.nodes):
            first, end = number * SLOTS // NODES, (number + 1) * SLOTS // NODES
            for command in (f"CLUSTER ADDSLOTSRANGE {first} {end - 1}", f"CLUSTER SET-CONFIG-EPOCH {number + 1}"):
                answer = _asked(node, command)
                if not answer.startswith("+OK"):
                    raise RuntimeError(f"{self.name}: {command}: {answer}")

    def _meet(self) -> None:
        """Tells the first node of the others. A greeting that was lost is repeated; one too many does no harm."""
        for node in self.nodes[1:]:
            _asked(self.nodes[0], f"CLUSTER MEET 127.0.0.1 {node.port} {node.bus_port}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def _asked(node: _Node, command: str) -> str:
    """What a node answers; nothing where it does not."""
    try:
        with socket.create_connection(("127.0.0.1", node.port), timeout=1.0) as asked:
            asked.sendall(command.encode() + b"\r\n")
            return asked.recv(4096).decode()
    except OSError:
        return ""


__all__ = ["RedisClusterServer"]
