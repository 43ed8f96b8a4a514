"""What compose.yaml starts, started: the brokers serve as one, Prometheus sees them with the configuration that ships,
the dashboard's queries find something, and the alert on a wrong clock fires and resolves."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

import timeline
from tests.deploy.composed import Composed
from tests.deploy.files import panels, rules
from tests.faults.faketime import WallClock
from tests.servers.prometheus import PrometheusServer

pytestmark = [pytest.mark.processes, pytest.mark.servers, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
"""Who waits longer has failed; nothing is measured by it."""
MAY_BE_EMPTY = re.compile(r"> 0\b|timeline_store_(free|size)_bytes|timeline_hints_total")
"""Queries that show nothing while all is well, or on a store that does not know its disk."""


async def until(condition: Callable[[], bool], looks_at: str) -> None:
    """Returns once `condition` holds."""
    await until_nothing(lambda: not condition(), looks_at)


async def until_nothing(missing: Callable[[], object], looks_at: str) -> None:
    """Returns once nothing is `missing`."""
    told: object = None
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while told := await asyncio.to_thread(missing):
                changed.clear()
                loop.call_later(0.1, changed.set)
                await changed.wait()
    except TimeoutError:
        pytest.fail(f"waited {PATIENCE_S:g} s for {looks_at}: {told}")


def shipped(cluster: Composed, path: str) -> Any:
    """What the Prometheus of compose.yaml answers."""
    with urllib.request.urlopen(f"http://{cluster.hosts['prometheus']}:9090/api/v1/{path}", timeout=10.0) as answer:
        return json.load(answer)["data"]


async def use(cluster: Composed, topic: str, count: int) -> None:
    """Puts messages through one broker and handles them through the other."""
    async with (
        timeline.connect(f"{cluster.hosts['broker-1']}:9000", timeout="30s") as first,
        timeline.connect(f"{cluster.hosts['broker-2']}:9000", timeout="30s") as second,
    ):
        for client in (first, second):
            await client.create_topic(topic)
        async with first.producer(topic) as p, second.consumer(topic, id="c") as c:
            receipts = await p.produce_many([timeline.Message(b"x", in_="50ms") for _ in range(count)])
            receipts.raise_failed()
            await p.produce(b"later", in_="5m", id="later")
            async for at, delivery in _counted(c):
                await delivery.ack()
                if at == count:
                    break


async def use_schedule(cluster: Composed, topic: str) -> None:
    """Create a schedule whose first occurrence is put at once, and due in a while."""
    async with timeline.connect(f"{cluster.hosts['broker-1']}:9000", timeout="30s") as tl:
        await tl.schedule(topic, "daily", every="1d", start=datetime.now(UTC) + timedelta(seconds=110))


async def use_http(cluster: Composed, topic: str) -> None:
    """Ask the gateway, and let it try a webhook to a receiver that it must not reach: it is released."""
    async with httpx.AsyncClient(base_url=f"http://{cluster.hosts['gateway']}:9080/v1", timeout=30) as http:
        hook = {"push_url": "http://10.0.0.1/hook", "retry_first": "100ms", "retry_cap": "100ms"}
        assert (await http.put(f"/topics/{topic}", json=hook)).status_code == 201
        assert (await http.post(f"/topics/{topic}/messages", json={"payload": 1, "in": 0})).status_code == 201


async def _counted(deliveries: Any) -> Any:
    at = 0
    async for delivery in deliveries:
        at += 1
        yield at, delivery


@pytest.mark.prove
async def test_every_query_of_the_dashboard_runs_and_finds_something(
    cluster: Composed, prometheus: PrometheusServer
) -> None:
    await use(cluster, "shown", 50)
    counted = 'timeline_expected_messages{topic="shown",within="10m"} == 1'
    await until(lambda: bool(prometheus.query(counted)), "counts of a topic")
    await use_http(cluster, "shown-pushed")
    await use_schedule(cluster, "shown")
    filled = {"$__rate_interval": "1m", "$job": "timeline", "$topic": "shown.*"}

    def empty() -> list[str]:
        found = []
        for title, query in panels():
            asked = re.sub(r"\$\w+", lambda name: filled[name[0]], query)
            if not prometheus.query(asked) and not MAY_BE_EMPTY.search(asked):
                found.append(f"{title}: {asked}")
        return found

    await until_nothing(empty, "every panel to show something")
    async with httpx.AsyncClient(base_url=f"http://{cluster.hosts['gateway']}:9080/v1", timeout=30) as http:
        assert (await http.delete("/topics/shown-pushed")).status_code == 204  # its receiver is down for good
    await until_nothing(prometheus.firing, "all to be well")


async def test_brokers_serve_as_one_and_the_prometheus_that_ships_sees_all(cluster: Composed) -> None:
    await use(cluster, "whole", 50)

    def healthy() -> list[str]:
        targets = shipped(cluster, "targets")["activeTargets"]
        return sorted(f"{found['labels']['job']} {found['health']}" for found in targets)

    await until(lambda: healthy() == ["etcd up"] * 3 + ["timeline up"] * 3, "all targets to be up")
    groups = shipped(cluster, "rules")["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == {rule.name for rule in rules()}

    def judged() -> bool:
        found = [rule["health"] for group in shipped(cluster, "rules")["groups"] for rule in group["rules"]]
        assert "err" not in found
        return set(found) == {"ok"}

    await until(judged, "every rule to be evaluated")


async def test_the_gateway_answers_for_both_brokers(cluster: Composed) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.hosts['gateway']}:9080/v1", timeout=30) as http:
        assert (await http.put("/topics/over-http", json={})).status_code == 201
        put = await http.post("/topics/over-http/messages", json={"id": "a", "payload": 1, "in": 0})
        assert (put.status_code, put.json()["status"]) == (201, "OK")
        (leased,) = (await http.post("/topics/over-http/leases", json={"wait": "20s"})).json()["messages"]
        settled = (await http.post("/leases:ack", json={"receipts": [leased["receipt"]]})).json()["results"]
        assert [(one["id"], one["status"]) for one in settled] == [("a", "OK")]


@pytest.mark.prove
async def test_a_wrong_clock_is_alerted_and_the_alert_ends_when_it_is_right(
    cluster: Composed, prometheus: PrometheusServer, wall: WallClock
) -> None:
    wrong = ("TimelineClockDriftCritical", f"{cluster.hosts['broker-2']}:9001")
    right = ("TimelineClockDriftCritical", f"{cluster.hosts['broker-1']}:9001")
    await until(lambda: len(prometheus.query("timeline_clocks_compared >= 3")) == 2, "clocks to be compared")
    assert wrong not in prometheus.firing()
    broker = cluster.parts["broker-2"]
    broker.stop()  # a clock that jumps while a broker runs is not followed: this one was wrong before it started
    wall.set("+3600")
    try:
        broker.launch()
        await until(lambda: wrong in prometheus.firing(), "the alert to fire")
        assert right not in prometheus.firing()
    finally:
        wall.set("+0")
    await until(lambda: wrong not in prometheus.firing(), "the alert to end")
    broker.await_ready()
