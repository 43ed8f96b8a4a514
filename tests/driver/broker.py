"""A broker in this process behind real gRPC on a free port."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Self

import grpc

from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.server.calls import Handlers
from timeline.broker.server.service import OPTIONS
from timeline.clock import Clock
from timeline.storage_plugins import make_store
from timeline.storage_plugins.contract import Store
from timeline.sync import make_membership
from timeline.wire.frames import SERVICE


class FewerMethods(Handlers):
    """The handlers of an older broker, which does not know the methods in `UNKNOWN`."""

    UNKNOWN = frozenset(f"/{SERVICE}/{method}" for method in ("Put", "Take", "Settle"))

    def service(self, details: Any) -> Any:
        return None if details.method in self.UNKNOWN else super().service(details)


class Broker:
    """`start` and `stop` it as often as you like: its port stays, and its store where that is on disk."""

    def __init__(self, store: Store | str = "memory://", name: str = "b1", limits: Limits | None = None) -> None:
        self._asked = store
        self.name = name
        self.limits = limits
        self.port = 0
        self.node: Node | None = None
        self.store: Store | None = None
        self._server: Any = None
        self.handlers = Handlers

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """A server that was never stopped hangs the thread that collects it as garbage."""
        await self.stop()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.store = make_store(self._asked) if isinstance(self._asked, str) else self._asked
        self.node = Node(
            store=self.store,
            clock=Clock(),
            membership=make_membership("local://"),
            random_bits=random.SystemRandom().getrandbits,
            name=self.name,
            version="test",
            limits=self.limits,
        )
        self._server.add_generic_rpc_handlers((self.handlers(self.node.service, self.node.limits.stall_ms),))
        await self.node.start()
        await self._server.start()

    async def stop(self) -> None:
        """As a crash: every stream breaks."""
        if self.node is not None:
            node, self.node = self.node, None
            await self._server.stop(None)
            await node.stop()

    async def restart(self) -> None:
        """Ends as a crash does, and comes back on the same port with the same store."""
        await self.stop()
        await self.start()

    async def drain_streams(self) -> None:
        """As on SIGTERM: tells every stream to leave, and serves no more. The store stays open for others."""
        assert self.node is not None
        node, self.node = self.node, None
        node.readiness.state = "draining"
        await node._drain(node.limits.hand_back_ms, node.limits.drain_streams_ms)
        await self._server.stop(1.0)
        await node.tasks.cancel()

    def hold(self) -> asyncio.Event:
        """Puts reach the store, but are not answered until the event is set."""
        assert self.node is not None
        store, held = self.node.store, asyncio.Event()
        put = store.put

        async def slow(*asked: Any) -> Any:
            answers = await put(*asked)
            await held.wait()
            return answers

        store.put = slow  # type: ignore[method-assign]
        return held
