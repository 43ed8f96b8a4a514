"""The gateway's process: readiness, tokens, logs, metrics, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import timeline
from tests.broker.journalled import until
from tests.gateway.conftest import Site
from tests.gateway.processes import broker, gateway, process
from tests.gateway.test_messages import problem
from tests.security.certificates import DAY, NOW, Authority, Pair
from tests.security.guarded import Tokens
from tests.servers.disk import small_disk
from timeline.child import free_ports
from timeline.credentials import PLAIN
from timeline.errors import Throttled
from timeline.gateway import clients as clients_module
from timeline.gateway import shapes
from timeline.gateway.app import application
from timeline.gateway.clients import STRANGERS, Caller, Clients
from timeline.gateway.document import rules
from timeline.gateway.document.answers import ANSWERS
from timeline.gateway.document.openapi import EXAMPLES, document_of
from timeline.gateway.service import GatewaySettings, HttpGateway
from timeline.gateway.tls import MOST_CONNECTIONS
from timeline.wire import MAX_TAKE_BYTES, MAX_TAKE_MESSAGES

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def test_probes_metrics_and_the_document(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).text == "alive\n"
    assert (await http.get("/readyz")).text == "ready\n"
    await http.get("/v1/topics/departures/messages/nothing")
    metrics = (await http.get("/metrics")).text
    route = 'method="GET",route="/v1/topics/{topic}/messages/{id}",status="404"'
    assert f"timeline_gateway_requests_total{{{route}}}" in metrics
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert document["components"]["schemas"]["NewMessage"]["additionalProperties"] is False
    for path, calls in document["paths"].items():
        for call in (call for call in calls.values() if isinstance(call, dict)):
            for status, answer in call["responses"].items():
                if problems := answer["content"].get("application/problem+json") if "content" in answer else None:
                    shown = [example["value"] for example in problems["examples"].values()]
                    assert shown and {one["status"] for one in shown} == {int(status)}, (path, status)
                    assert all(one["detail"] for one in shown), (path, status)
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/leases:ack" in page.text and "://" not in page.text
    assert "<p>Return a message with its state, its headers and its payload.</p>" in page.text
    assert "<code>Idempotency-Key</code>: a repeat of the same request moves nothing again" in page.text


def test_every_body_of_a_call_has_an_example_that_is_taken() -> None:
    asked = {name for name, kind in vars(shapes).items() if isinstance(kind, type) and issubclass(kind, shapes.Asked)}
    assert set(EXAMPLES) == asked - {"Asked", "Rules", "ScheduleFields"}  # what other shapes have in common
    for name, example in EXAMPLES.items():
        msgspec.json.decode(msgspec.json.encode(example), type=getattr(shapes, name))


def test_every_example_of_an_answer_is_one() -> None:
    for name, example in ANSWERS.items():
        answer = msgspec.json.decode(msgspec.json.encode(example), type=getattr(shapes, name))
        assert json.loads(msgspec.json.encode(answer)) == example, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_body_and_every_answer_of_the_document_has_an_example() -> None:
    app: Any = application(HttpGateway(GatewaySettings(), "test"))
    document = document_of(app._inside._inside)
    schemas = document["components"]["schemas"]

    def shown(schema: Any) -> bool:
        named = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if "examples" in named or named.get("type") == "null":
            return True
        parts = named.get("anyOf") or [named["items"]] if "items" in named or "anyOf" in named else []
        return bool(parts) and all(map(shown, parts))

    for path, calls in document["paths"].items():
        for call in calls.values():
            for part in (call.get("requestBody", {}), *call["responses"].values()):
                for kind, content in part.get("content", {}).items():
                    assert "examples" in content or shown(content["schema"]), (path, call["operationId"], kind)


def test_the_documents_bounds_of_a_lease_are_the_wires() -> None:
    assert (rules.MAX_LEASED, rules.MAX_LEASED_BYTES) == (MAX_TAKE_MESSAGES, MAX_TAKE_BYTES)


async def logged(site: Site, text: str) -> str:
    """The whole lines of the gateway's log, once `text` is in one. A line is written after the answer."""
    async with asyncio.timeout(60):
        while text not in (whole := site.log.read_text().rpartition("\n")[0]):
            await asyncio.sleep(0)
    return whole


async def test_each_request_is_one_line_without_payload(http: httpx.AsyncClient, site: Site) -> None:
    secret = "timeline_0123456789ab_" + "c" * 64
    headers = {"Authorization": f"Bearer {secret}"}
    body = {"id": "logged", "payload": "very private", "in": "1h"}
    await http.post("/v1/topics/departures/messages", json=body, headers=headers)
    assert (await http.get("/v1/topics/departures/messages/gone")).status_code == 404
    log = await logged(site, '"path": "/v1/topics/departures/messages/gone"')
    assert log.count('"path": "/v1/topics/departures/messages/gone"') == 1
    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = [one for one in lines if one.get("path") == "/v1/topics/departures/messages"]
    assert (line["method"], line["status"], line["route"]) == ("POST", 201, "/v1/topics/{topic}/messages")
    assert line["took_ms"] > 0
    assert "very private" not in log and "c" * 64 not in log


async def test_metrics_count_time_and_tell_what_is_under_way(tmp_path: Path, site: Site) -> None:
    with gateway(tmp_path, site.broker) as opened:
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http:
            path, route = "/v1/topics/departures/messages", "/v1/topics/{topic}/messages"

            async def value(of: str) -> float:
                lines = (await http.get("/metrics")).text.splitlines()
                return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == of), 0.0)

            for body, status in (({"payload": 1, "in": "1h"}, 201), ({"in": "1h"}, 400)):
                assert (await http.post(path, json=body)).status_code == status
                labels = f'{{method="POST",route="{route}",status="{status}"}}'
                assert await value(f"timeline_gateway_requests_total{labels}") == 1.0
                assert await value(f"timeline_gateway_request_seconds_count{labels}") == 1.0
                assert await value(f"timeline_gateway_request_seconds_sum{labels}") > 0.0
            assert await value("timeline_gateway_requests_in_flight") == 1.0, "the one that asks"
            async with http.stream("GET", "/v1/topics/departures/stream") as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == ": open"
                assert await value("timeline_gateway_streams") == 1.0
                assert await value("timeline_gateway_requests_in_flight") == 2.0
            while await value("timeline_gateway_streams"):
                pass  # it is noticed soon
            assert await value("timeline_gateway_requests_in_flight") == 1.0


@pytest.mark.prove
async def test_without_a_broker_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    with gateway(tmp_path, "127.0.0.1:1") as opened:
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http:
            assert (await http.get("/healthz")).status_code == 200
            ready = await http.get("/readyz")
            assert ready.status_code == 503 and "no broker could be reached" in ready.text
            answer = await http.post("/v1/topics/departures/messages", json={"payload": 1, "in": 1})
            assert "no broker could be reached" in problem(answer, 503, "UNAVAILABLE")
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_gateway_that_starts_before_its_broker_says_so(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with gateway(tmp_path, address) as opened:
        await until(lambda: "not ready yet: UNAVAILABLE: no broker could be reached" in opened["log"].read_text())
        with process(tmp_path, "serve", "--listen", address, "--metrics", "off", "--http", "off"):
            await until(lambda: "ready: a broker serves calls" in opened["log"].read_text())
    assert opened["log"].read_text().count("not ready yet") == 1


@pytest.mark.parametrize("guarded", [False, True], ids=["open", "tokens"])
async def test_it_is_ready_only_while_a_broker_is(tmp_path: Path, guarded: bool) -> None:
    """A broker whose store is full answers, but takes no puts."""
    tokens = Tokens(tmp_path)
    token = tokens.add("admin", "admin", "produce")
    more = ("--tokens", str(tokens.path)) if guarded else ()
    with (
        small_disk(tmp_path / "disk", "8m") as disk,
        broker(tmp_path, "--store", f"sqlite:///{disk}/a.db", *more) as served,
        gateway(tmp_path, served["listen"]) as opened,
    ):
        async with (
            httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http,
            timeline.connect(served["listen"], token=token if guarded else None) as tl,
        ):
            await tl.create_topic("departures")
            assert (await http.get("/readyz")).status_code == 200
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4_096)):
                    pass
            async with tl.producer("departures") as p:
                with pytest.raises(timeline.Unavailable, match="takes no puts"):
                    while True:
                        with contextlib.suppress(timeline.Unknown):  # the machine was busy for two seconds
                            await p.produce(bytes(50_000), in_="1h", timeout="2s")
            await until(lambda: httpx.get(f"http://{opened['listen']}/readyz").status_code == 503)
            assert "no broker takes all calls" in (await http.get("/readyz")).text
            ballast.unlink()
            await until(lambda: httpx.get(f"http://{opened['listen']}/readyz").status_code == 200)


async def test_a_broker_that_a_client_has_learned_of_counts(tmp_path: Path) -> None:
    """Calls go to it, too, while the given ones are away."""
    with broker(tmp_path) as served:
        clients = Clients("127.0.0.1:1", PLAIN)
        async with clients.serving(Caller()) as client:
            assert not await clients.any_ready(20.0)
            client.timeline._context.channel.learn([served["listen"]])
            assert await clients.any_ready(20.0)
        await clients.aclose()


async def test_the_broker_decides_about_tokens(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    admin, reader = tokens.add("admin", "admin", "produce"), tokens.add("reader", "consume", topics=["other"])
    with broker(tmp_path, "--tokens", str(tokens.path)) as served, gateway(tmp_path, served["listen"]) as opened:
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http:
            assert (await http.get("/readyz")).status_code == 200
            path = "/v1/topics/departures/messages"
            body = {"payload": 1, "in": "1h"}

            async def ask(token: str) -> httpx.Response:
                return await http.post(path, json=body, headers={"Authorization": f"Bearer {token}"})

            none = await http.post(path, json=body)
            assert "send the header 'Authorization: Bearer'" in problem(none, 401, "UNAUTHENTICATED")
            assert none.headers["www-authenticate"] == "Bearer"
            problem(await ask("nonsense"), 401, "UNAUTHENTICATED")
            problem(await ask(admin[:-1] + ("0" if admin[-1] != "0" else "1")), 401, "UNAUTHENTICATED")
            problem(await http.post(path, json=body, headers={"Authorization": "Basic eA=="}), 401, "UNAUTHENTICATED")
            problem(await ask(reader), 403, "FORBIDDEN")
            problem(await ask(admin), 404, "NOT_FOUND")


async def test_it_ends_after_the_requests_under_way(tmp_path: Path, site: Site) -> None:
    with gateway(tmp_path, site.broker) as opened:
        url = f"http://{opened['listen']}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            waiting = asyncio.create_task(http.post("/v1/topics/departures/leases", json={"wait": "10m"}))
            async with asyncio.timeout(60):
                while "in_flight 2.0" not in (await http.get("/metrics")).text:
                    pass
            opened["process"].send_signal(signal.SIGTERM)
            answer = await waiting
            assert (answer.status_code, answer.json()) == (200, {"messages": []})
        assert opened["process"].wait(60) == 0


async def test_an_upload_under_way_ends_its_connection(tmp_path: Path, site: Site) -> None:
    """Its answer comes, and nothing more is served there."""
    with gateway(tmp_path, site.broker) as opened:
        host, _, port = opened["listen"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/topics/departures/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        body = b'{"id":"uploaded","payload":1,"in":"1h"}'
        writer.write(
            f"{head}Content-Type: application/json\r\n\r\n{len(body) - 1:x}\r\n".encode() + body[:-1] + b"\r\n"
        )
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http, asyncio.timeout(60):
            while "in_flight 2.0" not in (await http.get("/metrics")).text:
                pass
        opened["process"].send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while "about to end" not in (await _ready(opened["listen"])):
                pass
        writer.write(b"1\r\n}\r\n0\r\n\r\n")
        async with asyncio.timeout(20):
            answered = await reader.read()
        assert answered.startswith(b"HTTP/1.1 201") and b'"uploaded"' in answered
        writer.close()


async def _ready(listen: str) -> str:
    """What a probe hears: once the gateway takes no more connections, that it is about to end."""
    try:
        async with httpx.AsyncClient(base_url=f"http://{listen}", timeout=60) as http:
            return (await http.get("/readyz")).text
    except httpx.TransportError:
        return "about to end"


def test_beyond_this_machine_it_wants_tls(tmp_path: Path) -> None:
    import subprocess

    from tests.gateway.processes import TIMELINE

    done = subprocess.run(
        [*TIMELINE, "gateway", "--listen", "0.0.0.0:0"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 4
    assert "there is no TLS" in done.stderr and "--insecure" in done.stderr


async def test_a_trace_goes_on_in_the_message(http: httpx.AsyncClient, site: Site) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    path, headers = "/v1/topics/departures/messages", {"traceparent": parent}
    made = await http.post(path, json={"payload": 1, "in": "1h"}, headers=headers)
    assert (await http.get(f"{path}/{made.json()['id']}")).json()["headers"]["traceparent"] == parent
    own = await http.post(path, json={"id": "own trace", "payload": 1, "in": "1h"}, headers=headers)
    assert own.status_code == 201
    assert "traceparent" not in (await http.get(f"{path}/own%20trace")).json()["headers"]
    await logged(site, parent)


async def test_a_head_without_end_is_cut_off(http: httpx.AsyncClient, site: Site) -> None:
    host, _, port = site.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            writer.write(b"a" * 65_536)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert (await http.get("/healthz")).status_code == 200


HOSTS = {
    "localhost": True, "localhost:9080": True, "LOCALHOST": True, "127.0.0.1:1": True, "[::1]:9080": True,
    "10.1.2.3": True, "app.example.org": True, "app.example.org:443": True, "evil.example": False,
    "evil.example:9080": False, "localhost.evil.example": False, "127.0.0.1.evil.example": False, "a:b:c/@": False,
    "": False, "localhost.": True, "app.localhost:9080": True, "evillocalhost": False,
}  # fmt: skip


async def test_a_page_cannot_reach_a_gateway_of_this_machine_by_a_name_of_its_own(tmp_path: Path, site: Site) -> None:
    """It may lead its name here (DNS rebinding). It is then a page of the same origin, to its browser."""
    with gateway(tmp_path, site.broker, "--origin", "https://app.example.org") as opened:
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}") as http:
            for host, known in HOSTS.items():
                page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
                for headers in (page, {"Host": host}):
                    listed = await http.get("/v1/topics", headers=headers)
                    path = "/v1/topics/departures/messages"
                    put = await http.post(path, headers=headers, json={"payload": 1, "in": "1h"})
                    assert (listed.status_code, put.status_code) == ((200, 201) if known else (403, 403)), host
            assert put.json()["code"] == "FORBIDDEN" and "--origin" in put.json()["detail"]
            assert (await http.get("/healthz", headers={"Host": "evil.example"})).status_code == 403


async def test_pages_of_other_origins_are_let_in_only_if_listed(tmp_path: Path, site: Site) -> None:
    origin = {"Origin": "https://app.example.org"}
    async with httpx.AsyncClient(base_url=site.url, timeout=60) as http:
        answer = await http.get("/v1/topics", headers=origin)
        assert "access-control-allow-origin" not in answer.headers
    with gateway(tmp_path, site.broker, "--origin", origin["Origin"]) as opened:
        async with httpx.AsyncClient(base_url=f"http://{opened['listen']}", timeout=60) as http:
            answer = await http.get("/v1/topics", headers=origin)
            assert answer.headers["access-control-allow-origin"] == origin["Origin"]
            other = await http.get("/v1/topics", headers={"Origin": "https://evil.example.org"})
            assert other.headers.get("access-control-allow-origin") != "https://evil.example.org"


@pytest.mark.parametrize(
    ("page", "let_in"),
    [
        ({"Origin": "https://evil.example.org"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "https://evil.example.org", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "the gateway's own"}, True),
    ],
)
async def test_a_page_of_another_site_changes_and_takes_nothing(
    http: httpx.AsyncClient, site: Site, page: dict[str, str], let_in: bool
) -> None:
    """A browser sends such requests without asking: a form's, one without a content type, an image."""
    headers = {name: site.url if text.startswith("the") else text for name, text in page.items()}
    topic = "/v1/topics/departures"
    made = await http.post(f"{topic}/messages", json={"payload": 1, "in": 0})
    calls = [
        ("POST", f"{topic}/messages", b'{"payload":1,"in":"1h"}'),
        ("POST", "/v1/leases:ack", b'{"receipts":["none"]}'),
        ("POST", f"{topic}/leases", b'{"wait":0}'),
        ("POST", f"{topic}/dead:purge", b'{"all":true}'),
        ("GET", f"{topic}/stream", b""),
    ]
    for method, path, body in calls:
        async with http.stream(method, path, content=body, headers=headers) as answer:
            assert (answer.status_code == 403) is not let_in
            if not let_in:
                await answer.aread()
                assert "--origin" in problem(answer, 403, "FORBIDDEN")
    found = await http.get(f"{topic}/messages/{made.json()['id']}", headers=headers)
    assert found.json()["deliveries"] == 0 or let_in


async def test_a_renewed_certificate_is_served_and_handshakes_are_bounded(tmp_path: Path, site: Site) -> None:
    authority = Authority(tmp_path, "authority")
    first, second = authority.issue("first"), authority.issue("second")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def use(pair: Pair) -> None:
        for made, file in ((pair.cert, cert), (pair.key, key)):
            shutil.copy(made, f"{file}.new")
            os.replace(f"{file}.new", file)

    async def served() -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()
        return ssl.DER_cert_to_PEM_cert(shown).encode()

    use(first)
    flags = ("--listen", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key))
    with gateway(tmp_path, site.broker, *flags) as opened:
        port = int(opened["listen"].rpartition(":")[2])
        before = await served()
        assert before in Path(first.cert).read_bytes()
        key.write_text("no key")
        assert await served() == before, "the last good one stays"
        use(authority.issue("expired", starts=NOW - 20 * DAY, ends=NOW - DAY))
        assert await served() == before, "nobody would accept this one"
        cert.unlink()
        os.mkfifo(cert)
        assert await served() == before, "a pipe is not waited for"
        use(second)
        assert await served() in Path(second.cert).read_bytes()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CONNECTIONS + 50)]
        async with asyncio.timeout(60):
            assert await silent[0][0].read() == b"", "the handshake that lasts longest gives way"
        assert await served()
        for _, writer in silent:
            writer.close()


async def test_beyond_this_machine_its_broker_must_ask_for_tokens(tmp_path: Path, site: Site) -> None:
    pair = Authority(tmp_path, "authority").issue("gateway")
    secure = ("--listen", "0.0.0.0:0", "--tls-cert", pair.cert, "--tls-key", pair.key)
    tokens = Tokens(tmp_path)
    admin = {"Authorization": f"Bearer {tokens.add('admin', 'admin')}"}
    with gateway(tmp_path, site.broker, *secure) as opened:
        port = opened["listen"].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", timeout=60, verify=False) as http:
            assert "asks for no tokens" in problem(await http.get("/v1/topics"), 503, "UNAVAILABLE")
            assert "asks for no tokens" in problem(await http.get("/v1/topics/departures/stream"), 503, "UNAVAILABLE")
            assert (await http.get("/readyz")).status_code == 503
    with (
        broker(tmp_path, "--tokens", str(tokens.path)) as served,
        gateway(tmp_path, served["listen"], *secure) as opened,
    ):
        port = opened["listen"].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", timeout=60, verify=False) as http:
            assert (await http.get("/readyz")).status_code == 200
            problem(await http.get("/v1/topics"), 401, "UNAUTHENTICATED")
            assert (await http.get("/v1/topics", headers=admin)).json() == {"topics": []}


async def test_before_a_broker_has_answered_nobody_is_refused_for_good(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "authority").issue("gateway")
    secure = ("--listen", "0.0.0.0:0", "--tls-cert", pair.cert, "--tls-key", pair.key)
    with gateway(tmp_path, "127.0.0.1:1", *secure) as opened:
        port = opened["listen"].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", timeout=60, verify=False) as http:
            answer = await http.get("/v1/topics", headers={"Host": "timeline.example.org"})
            assert "no broker could be reached" in problem(answer, 503, "UNAVAILABLE")


async def test_one_token_has_so_many_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on. Where no tokens are asked for, nobody can be told apart."""
    monkeypatch.setattr(clients_module, "MOST_OF_TOKEN", 2)
    one, other = (Caller(f"timeline_{number:012x}_{'c' * 64}") for number in range(2))
    clients = Clients("127.0.0.1:1", PLAIN)
    async with contextlib.AsyncExitStack() as calls:
        for caller in (one, one, other, Caller(), Caller(), Caller()):
            await calls.enter_async_context(clients.serving(caller))
        with pytest.raises(Throttled, match="2 requests of this token"):
            await calls.enter_async_context(clients.serving(one))
    await clients.aclose()


async def test_unknown_tokens_of_an_outage_shut_nobody_out(tmp_path: Path) -> None:
    """Each waits for its answer, and is forgotten then."""
    caller = [Caller(f"timeline_{number:012x}_{'c' * 64}") for number in range(STRANGERS + 1)]
    clients = Clients("127.0.0.1:1", PLAIN)

    async def ask(one: Caller) -> None:
        async with clients.serving(one):
            pass

    for _ in range(2):
        told = await asyncio.gather(*map(ask, caller), ask(Caller()), return_exceptions=True)
        refused = [one for one in told if one is not None]
        assert [type(one) for one in refused] == [Throttled], "one too many at once; the gateway's own is none of them"
        assert [*clients._clients] == [Caller()]
    await clients.aclose()
