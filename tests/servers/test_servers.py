"""Servers start, die, come back on their data, and say why when they cannot start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.servers.redis import RedisServer
from tests.services import require_service

pytestmark = pytest.mark.servers


@pytest.fixture
def redis(tmp_path: Path) -> RedisServer:
    require_service("redis")
    return RedisServer(tmp_path)


def _asked(server: RedisServer, command: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as asked:
        asked.sendall(command + b"\r\n")
        return asked.recv(256)


def test_a_killed_server_comes_back_on_its_data(redis: RedisServer) -> None:
    redis.settings = ("--appendfsync", "always")
    try:
        redis.start()
        assert _asked(redis, b"SET a 1").startswith(b"+OK")
        redis.kill()
        assert not redis.ready()
        redis.start()
        assert b"1" in _asked(redis, b"GET a")
    finally:
        redis.stop()
    assert not redis.accepts()
    redis.stop()


def test_a_server_that_cannot_start_says_why(redis: RedisServer) -> None:
    redis.settings = ("--no-such-setting", "1")
    with pytest.raises(RuntimeError, match=r"redis ended with 1: [\s\S]*no-such-setting"):
        redis.start()
