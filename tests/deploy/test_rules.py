"""The alert rules: promtool runs their tests, each alert has one that fires and one that keeps silent, and all of them
ask for what brokers export."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from tests.deploy.files import PROMETHEUS, ROOT, RULES, read_yaml, rules, unknown_in

TESTS = PROMETHEUS / "alerts_test.yml"


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_finds_the_configuration_and_the_rules_sound(require_service: Callable[[str], None]) -> None:
    require_service("prometheus")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", *(str(path) for path in sorted(RULES.glob("*.yml"))))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.prove
def test_promtool_runs_the_tests_of_the_rules(require_service: Callable[[str], None]) -> None:
    require_service("prometheus")
    assert "SUCCESS" in promtool("test", "rules", TESTS.name)


def test_every_alert_has_a_test_that_fires_and_one_that_keeps_silent() -> None:
    asked = [case for test in read_yaml(TESTS)["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in asked if case["exp_alerts"]}
    silent = {case["alertname"] for case in asked if not case["exp_alerts"]}
    alerts = {rule.name for rule in rules() if rule.alert}
    assert len(alerts) >= 14
    assert fires == alerts and silent == alerts


@pytest.mark.slow
def test_rules_ask_for_what_brokers_export() -> None:
    assert not {rule.name: unknown for rule in rules() if (unknown := unknown_in(rule.query))}


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ('rate(timeline_store_calls_total{outcome="OK",job="a"}[5m])', []),
        ("timeline_no_such_total", ["timeline_no_such_total"]),
        ("timeline_store_call_seconds", ["timeline_store_call_seconds"]),
        ('timeline_store_call_seconds_bucket{le="0.1",topic="t"}', ["timeline_store_call_seconds_bucket: topic"]),
        ("timeline:no:rate5m", ["timeline:no:rate5m"]),
    ],
)
def test_the_guard_of_queries_sees_what_is_unknown(query: str, unknown: list[str]) -> None:
    assert unknown_in(query) == unknown


def test_every_alert_says_how_bad_it_is_and_has_a_section_in_the_docs() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (Timeline\w+)$", page, re.MULTILINE)
    alerts = [rule for rule in rules() if rule.alert]
    assert headings == [alert.name for alert in alerts], "docs/alerts.md: a section for each alert, in their order"
    for alert in alerts:
        assert alert.labels["severity"] in ("warning", "critical")
        assert alert.annotations["summary"]
        assert alert.annotations["page"] == f"docs/alerts.md#{alert.name.lower()}"
