"""Leases: take due messages by long poll, and settle them by their receipts."""

from __future__ import annotations

from typing import Any

from litestar import Response, post

from timeline.driver.consume.pull import PulledDelivery
from timeline.driver.receipts import Receipt
from timeline.gateway.clients import CallerClient
from timeline.gateway.problems import documented
from timeline.gateway.putting import why_failed
from timeline.gateway.requests import ApiRequest, while_connected
from timeline.gateway.service import gateway_of
from timeline.gateway.shapes import (
    AckLeases,
    BuryLeases,
    ExtendLeases,
    LeasedMessage,
    Leases,
    Leasing,
    ReleaseLeases,
    SettleAnswers,
    SettledMessage,
)
from timeline.gateway.values import due_of, iso, length, payload_fields, text_of
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
    at any gateway. A message that is not settled by `lease_until` is delivered again."""
    gateway = gateway_of(request)
    name, wait = text_of(topic), length(data.wait, "wait")
    asked: dict[str, Any] = {} if data.max_bytes is None else {"max_bytes": data.max_bytes}
    if data.lease is not None:
        asked["lease"] = length(data.lease, "lease")
    taking = gateway.until_stopping(client.timeline.take(name, data.max, wait, **asked))
    return Leases([leased_message(one) for one in await while_connected(request, taking) or ()])


def leased_message(one: PulledDelivery) -> LeasedMessage:
    """Return a delivery for an answer."""
    headers = one.headers
    return LeasedMessage(
        id=one.id,
        receipt=one.receipt,
        headers=headers,
        tag=one.tag,
        due=iso(one.due_ms),
        scheduled=iso(one.scheduled_ms),
        deliveries=one.deliveries,
        lateness_ms=max(0, round(one.lateness.total_seconds() * 1000)),
        lease_until=iso(one.lease_until_ms),
        **payload_fields(one.payload, headers),
    )


async def _settle(client: CallerClient, receipts: list[str], verb: str, **asked: Any) -> Response[SettleAnswers]:
    told = await client.timeline.settle(receipts, verb, **asked)
    return Response(SettleAnswers([settled_message(receipt) for receipt in told]), status_code=207)


def settled_message(receipt: Receipt) -> SettledMessage:
    """Return what became of one receipt."""
    return SettledMessage(id=receipt.id, status=receipt.status, detail=why_failed(receipt))


@post("/leases:ack", operation_id="ackLeases", summary="Acknowledge", status_code=207, responses=documented())
async def ack(client: CallerClient, data: AckLeases) -> Response[SettleAnswers]:
    """The messages of these receipts are done, and are deleted. Each receipt has a status of its own."""
    return await _settle(client, data.receipts, "ack")


@post("/leases:extend", operation_id="extendLeases", summary="Extend", status_code=207, responses=documented())
async def extend(client: CallerClient, data: ExtendLeases) -> Response[SettleAnswers]:
    """The messages of these receipts stay leased for `lease` from now."""
    return await _settle(client, data.receipts, "extend", lease=length(data.lease, "lease"))


@post("/leases:release", operation_id="releaseLeases", summary="Release", status_code=207, responses=documented())
async def release(client: CallerClient, data: ReleaseLeases) -> Response[SettleAnswers]:
    """The messages of these receipts are due again: at once, after `in`, or `at` a time."""
    when = {} if data.at is None and data.in_ is None else due_of(data.at, data.in_)
    return await _settle(client, data.receipts, "release", reason=data.reason, **when)


@post("/leases:bury", operation_id="buryLeases", summary="Bury", status_code=207, responses=documented())
async def bury(client: CallerClient, data: BuryLeases) -> Response[SettleAnswers]:
    """The messages of these receipts become dead letters."""
    return await _settle(client, data.receipts, "bury", reason=data.reason)
