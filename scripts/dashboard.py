#!/usr/bin/env python3
"""Write Grafana's dashboard, deploy/grafana/dashboards/timeline.json, from the list of panels in panels.py.

Run it after a change of the list. A test fails if the file is out of date. `--print` shows the file instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.panels import BOARD, Panel  # noqa: E402  (as a script, its own folder is the path)

FILE = ROOT / "deploy" / "grafana" / "dashboards" / "timeline.json"
WIDTH, HEIGHT = 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def board() -> dict[str, Any]:
    """Return the dashboard in Grafana's format."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in BOARD.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": place, "panels": []})
        y += 1
        for at, panel in enumerate(members):
            x, down = at % 3 * WIDTH, at // 3 * HEIGHT
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y + down, "w": WIDTH, "h": HEIGHT}))
        y += -(-len(members) // 3) * HEIGHT
    return {
        "uid": "timeline",
        "title": "Timeline",
        "tags": ["timeline"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {
            "list": [_source(), _variable("job", "timeline_ready"), _variable("topic", "timeline_credit_messages")]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for at, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.means,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}


def _variable(name: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text())
    else:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text(), encoding="utf-8")
