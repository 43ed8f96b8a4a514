"""The page on which store to pick says what the code declares and the data tells, and `compose.yaml` starts what the
page names."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from scripts import stores_page

SERVERS = tuple(scheme for scheme, told in stores_page.told().items() if told.url)


def _services() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((stores_page.ROOT / "compose.yaml").read_text(encoding="utf-8"))
    services: dict[str, Any] = parsed["services"]
    return services


def test_the_page_is_current() -> None:
    written = stores_page.PAGE.read_text(encoding="utf-8")
    assert written == stores_page.page(), "run: python scripts/stores_page.py"


def test_every_plugin_is_told_of() -> None:
    assert set(stores_page.plugins()) <= set(stores_page.told())
    page = stores_page.page()
    for scheme, declared in stores_page.plugins().items():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{scheme}://` |")]
        assert len(rows) == 5, f"a row of {scheme} in each table"
        survives = "yes" if declared.durable else "no"
        assert rows[1].split(" | ")[1] == survives


def test_a_figure_that_nobody_measured_is_said_to_be_missing() -> None:
    told = stores_page.Told("pick", "loses", "limits", "tested", "settings", "bound", lateness_p50_ms=1.0)
    row = stores_page.Row("x", stores_page.plugins()["memory"], told)
    assert stores_page._figures(row)[1:5] == ["not measured"] * 4


@pytest.mark.parametrize(("rate", "shown"), [(None, "0.9 of the cycle, on another machine"), (8, "8/s")])
def test_a_share_is_shown_where_the_rate_itself_would_be_of_another_machine(rate: int | None, shown: str) -> None:
    figures = {"cycle_per_s": 10, "cycle_pending_per_s": rate, "cycle_pending_times": 0.9}
    told = stores_page.Told("pick", "loses", "limits", "tested", "settings", "bound", **figures)
    assert stores_page._figures(stores_page.Row("x", stores_page.plugins()["memory"], told))[2] == shown


def test_compose_has_a_profile_for_each_server() -> None:
    services = {name: service for name, service in _services().items() if service["profiles"] != ["cluster"]}
    assert {name: service["profiles"] for name, service in services.items()} == {name: [name] for name in SERVERS}
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", service["image"]) and service["image"].partition(":")[2] != "latest"
        assert service["healthcheck"]["test"], f"{name}: --wait waits for its health"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "nothing on a network"


@pytest.mark.parametrize("name", SERVERS)
def test_compose_starts_what_the_page_names(name: str) -> None:
    service, url = _services()[name], urlsplit(stores_page.told()[name].url)
    assert (url.scheme, url.hostname) == (name, "localhost")
    assert service["ports"] == [f"127.0.0.1:{url.port}:{url.port}"]
    environment = service.get("environment", {})
    if name in ("postgresql", "mysql"):
        prefix, database = ("POSTGRES", "DB") if name == "postgresql" else ("MARIADB", "DATABASE")
        named = [environment[f"{prefix}_{what}"] for what in ("USER", "PASSWORD", database)]
        assert named == [url.username, unquote(url.password or ""), url.path.removeprefix("/")]
    elif name == "cockroachdb":
        assert "--insecure" in service["command"] and (url.username, url.password) == ("root", None)
    else:
        assert url.username is None and url.password is None


def test_compose_loses_nothing_that_was_acknowledged() -> None:
    services = _services()
    assert "--appendfsync always" in services["redis"]["command"] and "noeviction" in services["redis"]["command"]
    assert "--innodb-flush-log-at-trx-commit=1" in services["mysql"]["command"]
    assert "commitlog_sync: batch" in services["cassandra"]["entrypoint"][-1]
    assert all(services[name]["volumes"] for name in SERVERS)
