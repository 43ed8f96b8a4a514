"""Recurring schedules: what rules give."""

from __future__ import annotations

from litestar import post

from timeline.errors import Unavailable
from timeline.gateway.clients import CallerClient
from timeline.gateway.problems import documented
from timeline.gateway.recurring import previewed
from timeline.gateway.requests import ApiRequest, while_connected
from timeline.gateway.service import gateway_of
from timeline.gateway.shapes import PreviewAnswer, PreviewRules


@post(
    "/schedules:preview",
    operation_id="previewSchedule",
    summary="Show the times that rules give",
    status_code=200,
    responses=documented(),
)
async def preview(request: ApiRequest, client: CallerClient, data: PreviewRules) -> PreviewAnswer:
    """Return the next times of cron expressions, of a period, or of rules of RFC 5545. Nothing is scheduled. It needs
    no `Idempotency-Key`: it changes nothing."""
    gateway = gateway_of(request)
    walk = gateway.walks.run(previewed(data, gateway.clock.now_ms()))
    told = await while_connected(request, walk, gateway.ending)
    if told is None:
        raise Unavailable("the gateway is about to end")
    return told
