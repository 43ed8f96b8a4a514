"""The Kubernetes manifests: valid by the published schemas, consistent with each other and with what `serve` takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from scripts import prometheus_rule
from tests.deploy.composed import instruction
from tests.deploy.files import DEPLOY, rules, unknown_in
from timeline import config
from timeline.cli.app import SETTINGS
from timeline.cli.run.gateway import gateway

FOLDER = DEPLOY / "kubernetes"
VERSION = "1.29"
"""Of the schemas; what is used here has not changed since 1.23."""
OF_OPERATORS = {"PrometheusRule", "ServiceMonitor"}
"""Kinds that are no part of Kubernetes: their own operator's schema is not published as a package."""


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield path, manifest


def one(kind: str, name: str = "timeline") -> dict[str, Any]:
    """The manifest of this kind and name."""
    (found,) = (made for _, made in manifests() if made["kind"] == kind and made["metadata"]["name"] == name)
    return found


def container(name: str = "timeline") -> dict[str, Any]:
    (found,) = one("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    "manifest", [pytest.param(made, id=f"{made['kind']} {made['metadata']['name']}") for _, made in manifests()]
)
def test_manifests_are_valid(manifest: dict[str, Any]) -> None:
    if manifest["kind"] not in OF_OPERATORS:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_manifest_that_is_not_valid_is_found() -> None:
    wrong = {**one("PodDisruptionBudget"), "spec": {"maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.slow
def test_everything_selects_the_brokers() -> None:
    labels = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert one("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert one("Service")["spec"]["selector"] == labels
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert one("ServiceMonitor")["spec"]["selector"]["matchLabels"] == one("Service")["metadata"]["labels"]
    target = one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", one("Deployment")["metadata"]["name"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timeline", "timeline-gateway"])
def test_the_monitor_scrapes_a_port_that_is_there(name: str) -> None:
    monitor, service = one("ServiceMonitor", name), one("Service", name)
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout"}
    ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert ports[endpoint["port"]] in {port["name"] for port in container(name)["ports"]}
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "timeline", "rules and dashboard tell clusters apart by the job"


@pytest.mark.slow
def test_the_operator_gets_the_rules_that_ship() -> None:
    written = (FOLDER / "rules.yaml").read_text(encoding="utf-8")
    assert written == prometheus_rule.text(), "run scripts/prometheus_rule.py"
    told = one("PrometheusRule")
    assert told["apiVersion"] == "monitoring.coreos.com/v1"
    given = [rule.get("alert") or rule["record"] for group in told["spec"]["groups"] for rule in group["rules"]]
    assert sorted(given) == sorted(rule.name for rule in rules())


@pytest.mark.slow
def test_the_container_is_told_what_serve_takes_and_probed_where_it_answers() -> None:
    told = {entry["name"]: entry.get("value", "") for entry in container()["env"]}
    known = {config.PREFIX + name.upper() for name in config.SETTINGS}
    assert {name for name in told if name.startswith(config.PREFIX)} <= known
    _, listen = config.split_address(told["TIMELINE_LISTEN"])
    _, metrics = config.split_address(told["TIMELINE_METRICS"])
    assert {port["name"]: port["containerPort"] for port in container()["ports"]} == {
        "grpc": listen,
        "metrics": metrics,
    }
    probed = {kind: container()[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")}
    assert probed == {
        "livenessProbe": {"path": "/healthz", "port": "metrics"},
        "readinessProbe": {"path": "/readyz", "port": "metrics"},
    }
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] * 1000 > config.parse_duration_ms(told["TIMELINE_GRACE"])
    assert pod["securityContext"]["runAsUser"] == int(instruction("USER")[0])
    assert pod["securityContext"]["runAsNonRoot"] and container()["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.slow
def test_the_gateway_is_selected_started_and_probed_where_it_answers() -> None:
    name = "timeline-gateway"
    deployment = one("Deployment", name)["spec"]
    wanted, labels = deployment["selector"]["matchLabels"], deployment["template"]["metadata"]["labels"]
    assert labels == wanted | {"timeline-client": "true"}, "the brokers' policy admits it"
    assert one("Service", name)["spec"]["selector"] == one("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
    assert one("Service", name)["spec"]["selector"] == wanted
    told = click.Context(gateway, **SETTINGS)  # its first context names its help option for good
    assert container(name)["args"][0] == gateway.name
    gateway.parse_args(told, container(name)["args"][1:])
    _, port = config.split_address(told.params["listen"])
    assert [(one["name"], one["containerPort"]) for one in container(name)["ports"]] == [("http", port)]
    probed = [container(name)[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")]
    assert probed == [{"path": "/healthz", "port": "http"}, {"path": "/readyz", "port": "http"}]
    pod = deployment["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] * 1000 > config.parse_duration_ms(told.params["grace"])
    assert pod["securityContext"]["runAsUser"] == int(instruction("USER")[0])
    assert pod["securityContext"]["runAsNonRoot"] and container(name)["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.slow
def test_autoscalers_ask_for_the_load_that_brokers_expect() -> None:
    rules = yaml.safe_load(one_config()["config.yaml"])["externalRules"]
    (rule,) = rules
    query = (
        rule["metricsQuery"]
        .replace("<<.Series>>", "timeline_expected_messages")
        .replace("<<.LabelMatchers>>", 'topic="t"')
    )
    assert not unknown_in(query)
    assert re.fullmatch(r'timeline_expected_messages\{namespace!=""\}', rule["seriesQuery"])
    asked = [
        metric["external"]["metric"]["name"]
        for _, manifest in manifests()
        if manifest["kind"] == "HorizontalPodAutoscaler"
        for metric in manifest["spec"]["metrics"]
        if metric["type"] == "External"
    ]
    assert asked == [rule["name"]["as"]] * 2


def one_config() -> dict[str, Any]:
    (found,) = (made for _, made in manifests() if made["kind"] == "ConfigMap")
    data: dict[str, Any] = found["data"]
    return data
