"""gRPC's health service. Whoever reaches the port may ask it, with a token or without: so those who watch are bounded,
and one of them who does not read what is written to him holds up nobody else. Of the broker's shell."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MOST_WATCHES = 256


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """What was `set` for each service's name."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.watches = 0

    async def set(self, service: str, status: int) -> None:
        """From now on this is how `service` is; those who watch are told."""
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:
        """How the service is now."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Any) -> None:
        """The same, again whenever it changes."""
        if self.watches >= MOST_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHES} watch already: ask by Check")
        self.watches += 1
        try:
            last = None
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                await changed.wait()
        finally:
            self.watches -= 1
