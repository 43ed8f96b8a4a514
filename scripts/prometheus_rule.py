#!/usr/bin/env python3
"""Write deploy/kubernetes/rules.yaml, the rules for Prometheus' operator, from deploy/prometheus/rules.

Run it after a change of those. A test fails if the file is out of date.
"""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
FILE = DEPLOY / "kubernetes" / "rules.yaml"
HEAD = """\
# Written by scripts/prometheus_rule.py from deploy/prometheus/rules, for the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: timeline
  labels: {app.kubernetes.io/name: timeline}
spec:
  groups:
"""


def text() -> str:
    """Return the file's text: the groups of all files in order, indented by two more spaces."""
    lines: list[str] = []
    for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
        _, _, groups = path.read_text(encoding="utf-8").partition("\ngroups:\n")
        lines += [f"  {line}" if line else line for line in groups.splitlines()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
