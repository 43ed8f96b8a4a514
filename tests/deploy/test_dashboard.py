"""Grafana's dashboard: current, whole, and asking for what is exported. test_cluster.py runs its queries."""

from __future__ import annotations

import json

import pytest

from scripts import dashboard
from tests.deploy.files import CATALOG, DASHBOARD, DEPLOY, ROOT, panels, read_yaml, rules, unknown_in


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert DASHBOARD.read_text(encoding="utf-8") == dashboard.text(), "run scripts/dashboard.py"


@pytest.mark.slow
def test_every_query_asks_for_what_brokers_and_gateways_export() -> None:
    assert not {f"{title}: {query}": unknown for title, query in panels() if (unknown := unknown_in(query))}


def test_every_metric_of_the_catalogs_is_on_the_dashboard() -> None:
    shown = " ".join([query for _, query in panels()] + [rule.query for rule in rules() if not rule.alert])
    assert not [name for name in CATALOG if name not in shown]


def test_every_panel_says_what_it_means_and_none_lies_on_another() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_grafana_is_told_where_the_dashboard_and_prometheus_are() -> None:
    provided = DEPLOY / "grafana" / "provisioning"
    (source,) = read_yaml(provided / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = read_yaml(provided / "dashboards" / "timeline.yml")["providers"]
    mounted = read_yaml(ROOT / "compose.yaml")["services"]["grafana"]["volumes"]
    folder = next(volume.split(":")[1] for volume in mounted if volume.startswith("./deploy/grafana/dashboards:"))
    assert provider["type"] == "file" and provider["options"]["path"] == folder
