"""Prometheus as a process, with the rules that ship, scraping whatever it is told to."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.servers.process import Server

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules"
HURRY = "1s"
"""How often it scrapes and reckons here."""


class PrometheusServer(Server):
    """One Prometheus. `targets`: host:port of each broker's metrics, read again whenever they change. Rules are those
    that ship, but for how long an alert must hold, which nobody waits for here (promtool's tests look at that)."""

    name = "prometheus"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._targets = folder / "targets.json"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> Sequence[str]:
        return [
            "prometheus",
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def prepare(self) -> None:
        rules = self.folder / "rules"
        rules.mkdir()
        for path in RULES.glob("*.yml"):
            hurried = re.sub(r"^(\s+)for: \w+$", r"\1for: 0s", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            (rules / path.name).write_text(hurried, encoding="utf-8")
        found = [{"files": [str(self._targets)], "refresh_interval": "1s"}]
        configuration = {
            "global": {"scrape_interval": HURRY, "scrape_timeout": HURRY, "evaluation_interval": HURRY},
            "rule_files": [f"{rules}/*.yml"],
            "scrape_configs": [{"job_name": "timeline", "scrape_timeout": HURRY, "file_sd_configs": found}],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        self.scrape()

    def scrape(self, *targets: str) -> None:
        """Scrapes these from now on."""
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps([{"targets": list(targets)}]), encoding="utf-8")
        fresh.replace(self._targets)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data that the HTTP API answers; ValueError with its reason for a query that it refuses."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10.0) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise ValueError(refused.read().decode()) from refused

    def query(self, query: str) -> list[dict[str, Any]]:
        """What an instant query finds now."""
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found

    def firing(self) -> set[tuple[str, str]]:
        """(alert, instance or topic) of what fires now."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance") or alert["labels"].get("topic", ""))
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }
