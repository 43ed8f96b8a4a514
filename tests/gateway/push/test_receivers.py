"""The receivers of docs/webhooks.md, each as it stands there, take what is signed and refuse what is not."""

from __future__ import annotations

import asyncio
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
    with out.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PORT": str(port), "SECRET": secret}, stdout=output
        )
    try:
        yield out.read_text
    finally:
        process.terminate()
        process.wait(30)


def listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


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
