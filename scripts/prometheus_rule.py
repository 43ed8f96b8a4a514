#!/usr/bin/env python3
"""Writes deploy/kubernetes/rules.yaml, Prometheus' rules as its operator for Kubernetes takes them, from
deploy/prometheus/rules. Run it after a change of those; a test says when the file is behind.
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
    """What the file says: the groups of all files one after the other, two spaces further in."""
    lines: list[str] = []
    for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
        _, _, groups = path.read_text(encoding="utf-8").partition("\ngroups:\n")
        lines += [f"  {line}" if line else line for line in groups.splitlines()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
