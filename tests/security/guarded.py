"""A broker in this process behind real gRPC that asks for tokens, or certificates, or both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

from timeline.broker.node import Node
from timeline.broker.server.calls import Handlers
from timeline.broker.server.certificates import Certificates
from timeline.broker.server.gatekeeper import Gatekeeper
from timeline.broker.server.service import OPTIONS
from timeline.broker.server.tokens import TokenRecord, change_tokens, digest, token_of
from timeline.clock import Clock
from timeline.metrics import Metrics
from timeline.storage_plugins import make_store
from timeline.sync import make_membership

_numbers = itertools.count(1)


class Tokens:
    """A file of tokens that a test adds to and takes from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        change_tokens(self.path, lambda tokens: tokens.values())

    def add(
        self,
        name: str,
        *rights: str,
        topics: Iterable[str] = ("*",),
        groups: Iterable[str] = ("*",),
        expires_ms: int = 0,
    ) -> str:
        """A new token's text."""
        number = next(_numbers)
        text = token_of(f"{number:012x}", f"{number:064x}")
        entry = TokenRecord(
            f"{number:012x}", name, digest(text), rights, tuple(topics), tuple(groups), 1, expires_ms
        ).check()
        change_tokens(self.path, lambda tokens: [*tokens.values(), entry])
        return text

    def revoke(self, name: str) -> None:
        """All of a name."""
        change_tokens(self.path, lambda tokens: [entry for entry in tokens.values() if entry.name != name])


class Guarded:
    """`look()` is what a broker does by itself twice a second."""

    def __init__(self, tokens: Tokens | None = None, certificates: Certificates | None = None) -> None:
        self.clock, self.metrics = Clock(), Metrics()
        self.now_ms = self.clock.now_ms
        self.gate = Gatekeeper(str(tokens.path) if tokens else "", lambda: self.now_ms(), self.metrics)
        self._certificates = certificates
        self.port = 0
        self.node: Node | None = None
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        listen = "127.0.0.1:0"
        if self._certificates is None:
            self.port = self._server.add_insecure_port(listen)
        else:
            self.port = self._server.add_secure_port(listen, self._certificates.credentials())
        self.node = Node(
            store=make_store("memory://"),
            clock=self.clock,
            membership=make_membership("local://"),
            random_bits=random.SystemRandom().getrandbits,
            name="guarded",
            version="test",
            metrics=self.metrics,
        )
        self._server.add_generic_rpc_handlers((Handlers(self.node.service, self.node.limits.stall_ms, self.gate),))
        await self.node.start()
        await self._server.start()

    async def stop(self) -> None:
        assert self.node is not None
        await self._server.stop(None)
        await self.node.stop()

    def look(self) -> None:
        """Reads tokens and certificates again where they have changed."""
        self.gate.look()
        if self._certificates is not None:
            self._certificates.look()

    def counted(self, metric: str, *labels: str) -> float:
        """What a counter says."""
        names = {"timeline_access_refused_total": ("cause",), "timeline_frames_refused_total": ("method",)}[metric]
        return self.metrics.registry.get_sample_value(metric, dict(zip(names, labels, strict=True))) or 0.0
