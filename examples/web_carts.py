"""A FastAPI handler that produces on each request: a cart that is left alone for a day gets a reminder.

Each change of a cart puts its reminder a day ahead, or moves the existing one. The checkout cancels it. A request is
answered after the broker's store has the reminder, so a confirmed reminder survives a crash of this service.

    timeline serve
    uvicorn examples.web_carts:app

then `curl -X PUT localhost:8000/carts/42` and `timeline ls carts`.

Needs `pip install 'timeline-scheduler[server,examples]'`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
REMIND_AFTER = os.environ.get("REMIND_AFTER", "24h")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open one client and one producer for all requests. Concurrent calls share a frame."""
    async with timeline.connect(ADDRESS) as tl, tl.producer("carts", group="shop") as reminders:
        await tl.create_topic("carts")
        app.state.reminders = reminders
        yield


app = FastAPI(lifespan=lifespan)


@app.put("/carts/{cart}")
async def change_cart(cart: str, request: Request) -> dict[str, str]:
    reminders: timeline.Producer = request.app.state.reminders
    receipt = await reminders.produce(cart.encode(), in_=REMIND_AFTER, id=f"cart-{cart}", if_exists="move")
    return {"cart": cart, "reminder": str(receipt.due)}


@app.delete("/carts/{cart}")
async def check_out(cart: str, request: Request) -> dict[str, str]:
    reminders: timeline.Producer = request.app.state.reminders
    try:
        await reminders.cancel(f"cart-{cart}")
    except timeline.NotFound:
        return {"cart": cart, "reminder": "sent before"}
    return {"cart": cart, "reminder": "cancelled"}


@app.exception_handler(timeline.TimelineError)
async def refuse(request: Request, error: timeline.TimelineError) -> JSONResponse:
    """Answer 503 if a retry may work, else 409 (a name that is too long, a reminder going out now)."""
    if not error.retryable:
        return JSONResponse({"error": str(error)}, status_code=409)
    return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})
