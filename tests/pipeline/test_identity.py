"""Who a pipeline is to brokers: what its process's variables say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.guarded import Guarded, Tokens
from tests.services import require_service
from timeline.driver.blocking.calls import Background
from timeline.errors import Forbidden, Invalid
from timeline.pipeline.connection import IDENTITY, SparkConnection, identity


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IDENTITY:
        monkeypatch.delenv(f"TIMELINE_{name}", raising=False)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
def broker(tokens: Tokens) -> Iterator[Guarded]:
    """It asks for tokens, and runs in a loop of its own beside the connection's."""
    made, background = Guarded(tokens), Background()
    background.run(made.start())
    yield made
    background.run(made.stop())
    background.close()


def test_a_connection_shows_the_token_of_its_process(
    broker: Guarded, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with SparkConnection(broker.address, 20_000) as nobody, pytest.raises(Forbidden, match="token"):
        nobody.run(nobody.client.topics())
    token = tokens.add("spark", "admin")
    broker.look()
    monkeypatch.setenv("TIMELINE_TOKEN", token)
    with SparkConnection(broker.address, 20_000) as connection:
        connection.run(connection.client.create_topic("departures"))
        assert connection.topic("departures").name == "departures"
    monkeypatch.delenv("TIMELINE_TOKEN")
    (tmp_path / "token").write_text(token)
    monkeypatch.setenv("TIMELINE_TOKEN_FILE", str(tmp_path / "token"))
    with SparkConnection(broker.address, 20_000) as connection:
        assert connection.topic("departures").name == "departures"


@pytest.mark.slow
def test_whether_rows_may_be_put_is_known_before_any_is(
    broker: Guarded, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_service("spark")
    from timeline.pipeline.jobs.load import LoadRequest, load

    governs = tokens.add("admin", "admin")
    puts, takes = tokens.add("web", "produce", groups=("web",)), tokens.add("worker", "consume")
    broker.look()
    monkeypatch.setenv("TIMELINE_TOKEN", governs)
    with SparkConnection(broker.address, 20_000) as connection:
        connection.run(connection.client.create_topic("departures"))
    monkeypatch.setenv("TIMELINE_TOKEN", puts)
    with SparkConnection(broker.address, 20_000) as connection:
        connection.check_put("departures", "web")
        with pytest.raises(Forbidden, match=r"group 'default': its groups are web.*--group NAME"):
            connection.check_put("departures", "default")
    with pytest.raises(Forbidden, match="its groups are web"):
        load(None, None, LoadRequest(broker.address, "departures", dry_run=True))  # type: ignore[arg-type]
    monkeypatch.setenv("TIMELINE_TOKEN", takes)
    with SparkConnection(broker.address, 20_000) as connection, pytest.raises(Forbidden, match="the right produce"):
        connection.check_put("departures", "default")


@pytest.mark.slow
def test_what_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not identity().tls
    monkeypatch.setenv("TIMELINE_TLS", "1")
    assert identity().tls
    monkeypatch.setenv("TIMELINE_TLS", "perhaps")
    with pytest.raises(Invalid, match=r"true or false .*TIMELINE_TLS"):
        identity()
    monkeypatch.setenv("TIMELINE_TLS", "false")
    assert not identity().tls
    monkeypatch.setenv("TIMELINE_TLS_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(Invalid, match=r"cannot be read.*TIMELINE_TLS_CA"):
        identity()
