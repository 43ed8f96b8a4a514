"""The receivers of docs/webhooks.md, each as it stands there, take what is signed and refuse what is not."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from standardwebhooks import Webhook

import timeline
from tests.broker.journalled import until
from tests.documents.pages import DOCS, blocks
from tests.gateway.push.test_pusher import produce, pushing, state_of
from timeline.child import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LANGUAGES = {"python": (), "js": ("node",), "go": ("go",), "bash": ("socat", "openssl")}
"""Each with what it needs from the machine."""
SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


def command(language: str, folder: Path, port: int) -> list[str]:
    """Save the page's receiver, and return what runs it."""
    (body,) = [block.body for block in blocks(DOCS / "webhooks.md") if block.language == language]
    names = {"python": "hook.py", "js": "hook.mjs", "go": "hook.go", "bash": "hook.sh"}
    file = folder / names[language]
    file.write_text(body)
    if language == "go":
        subprocess.run(["go", "build", "-o", "hook", file.name], cwd=folder, check=True)
        return [str(folder / "hook")]
    if language == "bash":
        file.chmod(0o755)
        return ["socat", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", "EXEC:./hook.sh"]
    return [sys.executable if language == "python" else "node", str(file)]


@contextmanager
def receiving(command: list[str], folder: Path, port: int, secret: str) -> Iterator[Callable[[], str]]:
    """Run a receiver. Yield what reads all that it got."""
    out = folder / "received.txt"
    environment = os.environ | {"PORT": str(port), "SECRET": secret}
    with out.open("ab") as output, (folder / "errors.txt").open("ab") as errors:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=errors)
    try:
        yield out.read_text
    finally:
        process.terminate()
        process.wait(30)


def signature_of(secret: str, id: str, timestamp: str, body: bytes) -> str:
    """Sign any timestamp. `Webhook.sign` takes times alone."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def unsigned(now_s: int, right: str) -> Iterator[dict[str, str]]:
    """Headers without a signature of this request, or with a broken one. `right`: the signature of another request."""
    headers = {"webhook-id": "m", "webhook-timestamp": str(now_s), "webhook-signature": right}
    yield {}
    for name in headers:
        yield {name: headers[name]}
        yield {other: value for other, value in headers.items() if other != name}
        yield headers | {name: ""}
    for broken in ("v1", "v1,", ",", "v1,A", "v1,!!!!", "v1,\xff", f"v1a,{right[3:]}", right[3:], "v1, v1,= ,,"):
        yield headers | {"webhook-signature": broken}
    for broken in ("soon", "-1", "1e9", "08", "\xb2", "9" * 400, "a[$(touch ran)]", "1;touch ran"):
        yield headers | {"webhook-timestamp": broken}


async def break_off(port: int) -> None:
    """Send half of a request, and disconnect."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /hook HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_receiver_refuses_what_is_not_signed_and_lives_on(
    language: str, tmp_path: Path, require_service: Callable[[str], None]
) -> None:
    for service in LANGUAGES[language]:
        require_service(service)
    (port,) = free_ports(1)
    run = await asyncio.to_thread(command, language, tmp_path, port)
    signer, now = Webhook(SECRET), datetime.now(UTC)
    now_s, url = int(now.timestamp()), f"http://127.0.0.1:{port}/hook"
    with receiving(run, tmp_path, port, SECRET) as received:
        await until(lambda: listens(port))
        await break_off(port)
        async with httpx.AsyncClient(timeout=30) as http:
            for headers in unsigned(now_s, signer.sign("m", now, "another")):
                raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
                for method, body in (("GET", None), ("POST", b"{}"), ("POST", b"")):
                    answer = await http.request(method, url, content=body, headers=raw)
                    assert answer.status_code == 401, (method, body, headers)
            for timestamp_s in ("soon", f"a[$(touch ran)]{now_s}"):  # who has the secret signs nonsense
                signature = signature_of(SECRET, "m", timestamp_s, b"{}")
                wrong = {"webhook-id": "m", "webhook-timestamp": timestamp_s, "webhook-signature": signature}
                assert (await http.post(url, content=b"{}", headers=wrong)).status_code == 401, timestamp_s
            assert received() == ""
            good = {
                "webhook-id": "m",
                "webhook-timestamp": str(now_s),
                "webhook-signature": f"v1,AAAA {signer.sign('m', now, '{}')}",
                "timeline-id": "a",
            }
            assert (await http.post(url, content=b"{}", headers=good)).status_code == 204
        assert received() == "a {}\n"
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in (tmp_path / "errors.txt").read_text()


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "bash"])
async def test_a_receiver_without_a_whole_secret_or_a_port_does_not_start(
    language: str, tmp_path: Path, require_service: Callable[[str], None]
) -> None:
    for service in LANGUAGES[language]:
        require_service(service)
    run = await asyncio.to_thread(command, language, tmp_path, 0)
    bad = ("", "whsec_…", SECRET[:-4])
    for given in ({"PORT": "1"}, {"SECRET": SECRET}, *({"PORT": "1", "SECRET": secret} for secret in bad)):
        bare = {name: value for name, value in os.environ.items() if name not in ("PORT", "SECRET")}
        ended = await asyncio.to_thread(
            subprocess.run, run, env=bare | given, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 1 and "Set SECRET to the topic's secret, whole, and PORT" in ended.stderr, given


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_receiver_of_the_page(
    language: str, tl: timeline.Timeline, tmp_path: Path, require_service: Callable[[str], None]
) -> None:
    for service in LANGUAGES[language]:
        require_service(service)
    (port,) = free_ports(1)
    run = await asyncio.to_thread(command, language, tmp_path, port)
    await tl.create_topic("t", push_url=f"http://127.0.0.1:{port}/hook", retry_first="100ms", retry_cap="100ms")
    (secret,) = await tl.topic_secrets("t")
    with receiving(run, tmp_path, port, secret) as received:
        await until(lambda: listens(port))
        now_s, old_s = int(time.time()), 1_700_000_000
        right = Webhook(secret).sign("m", datetime.fromtimestamp(old_s, UTC), "forged")
        async with httpx.AsyncClient() as http:
            for at_s, signature in ((now_s, "v1,AAAA"), (old_s, right)):  # another's, and one that is repeated
                signed = {"webhook-id": "m", "webhook-timestamp": str(at_s), "webhook-signature": signature}
                answer = await http.post(f"http://127.0.0.1:{port}/hook", content=b"forged", headers=signed)
                assert answer.status_code == 401, (at_s, signature)
        async with pushing(tl):
            await produce(tl, "a", headers={"content-type": "application/json"})
            assert await state_of(tl, "a", "gone") is None
        assert received() == 'a {"id": "a"}\n'
