"""Leases: take due messages by long poll, and settle them by their receipts."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post

from timeline.driver.consume.pull import PulledDelivery
from timeline.driver.receipts import Receipt
from timeline.driver.times import duration_ms
from timeline.gateway.clients import CallerClient
from timeline.gateway.keys import RepeatKey
from timeline.gateway.problems import documented
from timeline.gateway.putting import why_failed
from timeline.gateway.requests import ApiRequest, Streamed, too_crowded, while_connected
from timeline.gateway.service import gateway_of
from timeline.gateway.shapes import (
    AckLeases,
    BuryLeases,
    ExtendLeases,
    Leases,
    Leasing,
    ReleaseLeases,
    SettleAnswers,
    SettledMessage,
)
from timeline.gateway.streams import EVENT_STREAM, events
from timeline.gateway.values import due_of, leased_message, length, text_of
from timeline.model import Status


@post(
    "/topics/{topic:str}/leases",
    operation_id="leaseMessages",
    summary="Take due messages",
    status_code=200,
    responses=documented(Status.NOT_FOUND),
)
async def lease(request: ApiRequest, client: CallerClient, topic: str, data: Leasing) -> Leases:
    """Take up to `max` due messages. Wait for the first one, at most for `wait`. Each has a receipt, which settles it
    at any gateway. A message that is not settled by `lease_until` is delivered again. It needs no `Idempotency-Key`:
    messages of a lost answer come again, too."""
    gateway = gateway_of(request)
    name, wait = text_of(topic), length(data.wait, "wait")
    asked: dict[str, Any] = {} if data.max_bytes is None else {"max_bytes": data.max_bytes}
    if data.lease is not None:
        asked["lease"] = length(data.lease, "lease", least_ms=1)

    async def take() -> list[PulledDelivery]:
        await request.drained()
        if gateway.answers.crowded():
            raise too_crowded()
        return await client.timeline.take(name, data.max, wait, **asked)

    async def give_back(taken: list[PulledDelivery]) -> None:
        await client.timeline.settle([one.receipt for one in taken], "return")

    taken = await while_connected(request, take(), gateway.ending, give_back)
    if taken and gateway.answers.crowded():  # meanwhile
        await give_back(taken)
        raise too_crowded()
    return Leases([leased_message(one) for one in taken or ()])


@get(
    "/topics/{topic:str}/stream",
    operation_id="streamMessages",
    summary="Stream due messages as server-sent events",
    media_type=EVENT_STREAM,
    responses=documented(Status.NOT_FOUND),
)
async def stream(request: ApiRequest, topic: str, credit: int = 10, lease: str | None = None) -> Streamed:
    """Lease messages when they come due, and send each as an event whose data is a LeasedMessage, while the connection
    lives. `credit`: how many the reader may have at once. A receipt that is settled here gives its credit back."""
    lasts = None if lease is None else length(lease, "lease", least_ms=1)
    return Streamed(events(request, gateway_of(request), text_of(topic), credit, lasts), 200, EVENT_STREAM)


_LOST = (Status.NOT_FOUND, Status.FENCED, Status.EXPIRED, Status.DEAD)
"""Answers to a settle of a message that its caller has no more."""


async def _settle(
    request: ApiRequest, client: CallerClient, receipts: list[str], verb: str, **asked: Any
) -> Response[SettleAnswers]:
    told = await client.timeline.settle(receipts, verb, **asked)
    gateway = gateway_of(request)
    if gateway.streams:
        answers = [*zip(receipts, told, strict=True)]
        done = {receipt for receipt, answer in answers if answer.status is Status.OK}
        lost = {receipt for receipt, answer in answers if answer.status in _LOST}
        for open_stream in gateway.streams:
            open_stream.settled(lost)
            if verb == "extend":
                open_stream.extended(done, gateway.clock.monotonic_ms() + duration_ms(asked["lease"]))
            else:
                open_stream.settled(done)
    return Response(SettleAnswers([settled_message(receipt) for receipt in told]), status_code=207)


def settled_message(receipt: Receipt) -> SettledMessage:
    """Return what became of one receipt."""
    return SettledMessage(id=receipt.id, status=receipt.status, detail=why_failed(receipt))


@post("/leases:ack", operation_id="ackLeases", summary="Acknowledge", status_code=207, responses=documented())
async def ack(request: ApiRequest, client: CallerClient, data: AckLeases) -> Response[SettleAnswers]:
    """The messages of these receipts are done, and are deleted. Each receipt has a status of its own. It needs no
    `Idempotency-Key`: a receipt is of one delivery. A repeat of an ack that counted answers NOT_FOUND."""
    return await _settle(request, client, data.receipts, "ack")


@post("/leases:extend", operation_id="extendLeases", summary="Extend", status_code=207, responses=documented())
async def extend(request: ApiRequest, client: CallerClient, data: ExtendLeases) -> Response[SettleAnswers]:
    """The messages of these receipts stay leased for `lease` from now. It needs no `Idempotency-Key`: a repeat gets the
    same answer."""
    return await _settle(request, client, data.receipts, "extend", lease=length(data.lease, "lease", least_ms=1))


@post("/leases:release", operation_id="releaseLeases", summary="Release", status_code=207, responses=documented())
async def release(request: ApiRequest, client: CallerClient, data: ReleaseLeases) -> Response[SettleAnswers]:
    """The messages of these receipts are due again: at once, after `in`, or `at` a time. `Idempotency-Key`: a repeat of
    the same request releases nothing again, and gets the same answer."""
    when = {} if data.at is None and data.in_ is None else due_of(data.at, data.in_)
    ops = RepeatKey(request.key).operations("release", data.receipts, data.at, data.in_)
    return await _settle(request, client, data.receipts, "release", reason=data.reason, operation_ids=ops, **when)


@post("/leases:bury", operation_id="buryLeases", summary="Bury", status_code=207, responses=documented())
async def bury(request: ApiRequest, client: CallerClient, data: BuryLeases) -> Response[SettleAnswers]:
    """The messages of these receipts become dead letters. It needs no `Idempotency-Key`: a repeat gets the same
    answer."""
    return await _settle(request, client, data.receipts, "bury", reason=data.reason)
