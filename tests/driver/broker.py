"""A broker in this process behind real gRPC on a free port."""

from __future__ import annotations

import random
from typing import Any

import grpc

from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.service import OPTIONS, _Handlers
from timeline.clock import Clock
from timeline.storage_plugins import make_store
from timeline.storage_plugins.contract import Store
from timeline.sync import make_membership


class Broker:
    """`start` and `stop` it as often as you like: its store and its port stay."""

    def __init__(self, store: Store | None = None, name: str = "b1", limits: Limits | None = None) -> None:
        self.store = store if store is not None else make_store("memory://")
        self.name = name
        self.limits = limits
        self.port = 0
        self.node: Node | None = None
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.node = Node(
            store=self.store,
            clock=Clock(),
            membership=make_membership("local://"),
            random_bits=random.SystemRandom().getrandbits,
            name=self.name,
            version="test",
            limits=self.limits,
        )
        self._server.add_generic_rpc_handlers((_Handlers(self.node.service),))
        await self.node.start()
        await self._server.start()

    async def stop(self) -> None:
        """As a crash: every stream breaks."""
        if self.node is not None:
            node, self.node = self.node, None
            await self._server.stop(None)
            await node.stop()

    async def drain(self) -> None:
        """As on SIGTERM."""
        assert self.node is not None
        node, self.node = self.node, None
        await node.drain(5_000)
        await self._server.stop(1.0)
