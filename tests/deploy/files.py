"""The files of deploy/, read; and what of the catalog a query names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from timeline.gateway.metrics import CATALOG as OF_THE_GATEWAY
from timeline.metrics import CATALOG as OF_A_BROKER

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = PROMETHEUS / "rules"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "timeline.json"

CATALOG = {**OF_A_BROKER, **OF_THE_GATEWAY}
_METRIC = re.compile(r"\btimeline_\w+")
_RECORDED = re.compile(r"\btimeline:\w+:\w+")
_SELECTED = re.compile(r"\b(timeline_\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
OF_A_TARGET = {"job", "instance"}
"""Labels that a scrape adds."""


def read_yaml(path: Path) -> Any:
    """The one document in `path`."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Rule:
    """A rule: `name` of the alert or of what it records, its query, how long it must hold, what it says."""

    name: str
    query: str
    alert: bool
    annotations: dict[str, str]
    labels: dict[str, str]


def rules() -> Iterator[Rule]:
    """Every rule that ships."""
    for path in sorted(RULES.glob("*.yml")):
        for group in read_yaml(path)["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert") or rule["record"]
                yield Rule(name, rule["expr"], "alert" in rule, rule.get("annotations", {}), rule.get("labels", {}))


def panels() -> Iterator[tuple[str, str]]:
    """(title of the panel, query) of every query of the dashboard."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def unknown_in(query: str) -> list[str]:
    """What `query` names that nothing exports and no rule records, and labels that its metrics do not have."""
    recorded = {rule.name for rule in rules() if not rule.alert}
    found = [name for name in _RECORDED.findall(query) if name not in recorded]
    found += [name for name in _METRIC.findall(query) if _base(name) is None]
    for name, selectors in _SELECTED.findall(query):
        base = _base(name)
        labels = set(CATALOG[base].labels) if base else set()
        bucket = {"le"} if name.endswith("_bucket") else set()
        found += [
            f"{name}: {label}" for label in _LABEL.findall(selectors) if label not in labels | bucket | OF_A_TARGET
        ]
    return found


def _base(name: str) -> str | None:
    """The catalog's name of a series' name: a histogram's has three. None: there is none."""
    if name in CATALOG:
        return name if CATALOG[name].kind != "histogram" else None
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in CATALOG and CATALOG[base].kind == "histogram" else None
