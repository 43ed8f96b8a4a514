"""Compare Litestar with msgspec and FastAPI with pydantic on one body: an array of messages, decoded and answered.

Both applications are called without a network. Run it alone on a quiet machine:

    python scripts/http_frameworks.py --messages 1000 --calls 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import litestar
import msgspec
import pydantic
from fastapi import FastAPI


class StructMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message for msgspec. Its payload stays as it came."""

    payload: msgspec.Raw
    at: str | int | None = None
    id: str | None = None
    tag: str | None = None


STRUCTS = msgspec.json.Decoder(list[StructMessage])


class ModelMessage(pydantic.BaseModel, extra="forbid"):
    """The same for pydantic, which reads the payload."""

    payload: Any
    at: str | int | None = None
    id: str | None = None
    tag: str | None = None


@litestar.post("/messages", status_code=200)
async def of_structs(request: litestar.Request[Any, Any, Any]) -> list[dict[str, Any]]:
    """Answer as the gateway does, without a broker. It decodes the body itself, too."""
    return [{"id": one.id, "bytes": len(bytes(one.payload))} for one in STRUCTS.decode(await request.body())]


async def of_models(data: list[ModelMessage]) -> list[dict[str, Any]]:
    """Answer the same. The payload is encoded again, as a message needs bytes."""
    return [{"id": one.id, "bytes": len(json.dumps(one.payload))} for one in data]


async def call_ms(application: Any, body: bytes) -> float:
    """Return how long one call takes. Raise AssertionError if it fails."""
    scope = {
        "type": "http", "method": "POST", "path": "/messages", "raw_path": b"/messages", "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("localhost", 80),
        "client": ("localhost", 1), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    statuses = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event: dict[str, Any]) -> None:
        statuses.append(event.get("status", 200))

    began = time.perf_counter()
    await application(scope, receive, send)
    assert set(statuses) == {200}, statuses
    return (time.perf_counter() - began) * 1000


async def main() -> None:
    """Print the median time of a call of each, in alternating calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=200)
    asked = parser.parse_args()
    message = {"payload": {"gate": "A7", "seats": [1, 2, 3]}, "at": "2030-01-01T09:00Z", "id": "UA1545", "tag": "ops"}
    body = json.dumps([message] * asked.messages).encode()
    models = FastAPI()
    models.post("/messages")(of_models)
    applications = {"litestar": litestar.Litestar([of_structs], openapi_config=None), "fastapi": models}
    took: dict[str, list[float]] = {name: [] for name in applications}
    for _ in range(asked.calls):
        for name, application in applications.items():
            took[name].append(await call_ms(application, body))
    for name, times in took.items():
        print(f"{name:9} {statistics.median(times):8.3f} ms a call of {asked.messages} messages")


if __name__ == "__main__":
    asyncio.run(main())
