"""The libraries of Standard Webhooks for Go and Node verify our signatures. That for Python is asked in ../push."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.clients.toolkits import go_module, run, typescript_package
from tests.gateway.push.test_request import SECRETS, message
from timeline.gateway.push.request import headers_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def told(verify: Callable[[str], str]) -> list[str]:
    """What the library says: of both secrets of a rotation, of another secret, and of another body."""
    sent = message(payload='{"gate": "Ä7"}'.encode())
    headers = dict(headers_of(sent, SECRETS[:2], int(time.time())))
    body = sent.payload.decode()
    asked = [(SECRETS[0], body), (SECRETS[1], body), (SECRETS[2], body), (SECRETS[0], body.replace("7", "8"))]
    requests = [json.dumps({"secret": secret, "body": text, "headers": headers}) for secret, text in asked]
    return [verify(request).strip() for request in requests]


SAID = ["verified", "verified", "refused", "refused"]


def test_go(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    require_service("go_client")
    module = go_module(tmp_path)
    run(module, "go", "build", "-o", "verify-hook", "./verify")
    assert told(lambda request: run(module, "./verify-hook", said=request)) == SAID


def test_node(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    require_service("typescript_client")
    package = typescript_package(tmp_path)
    assert told(lambda request: run(package, "node", "verify.js", said=request)) == SAID
