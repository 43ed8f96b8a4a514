"""compose.yaml, the Dockerfile and what they name: sound without an engine to run them. test_cluster.py starts it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import timeline
from scripts import stores_page
from tests.deploy.composed import COMPOSE, DOCKERFILE, Composed, env_file, instruction, services
from tests.deploy.files import DEPLOY, ROOT, read_yaml
from timeline import config
from timeline.storage_plugins import make_store

STORES = sorted(path.stem for path in (DEPLOY / "compose").glob("*.env"))
CLUSTER = {"etcd-1", "etcd-2", "etcd-3", "broker-1", "broker-2", "gateway", "prometheus", "grafana"}


@pytest.mark.slow
@pytest.mark.parametrize("slip", ["", "healthchek", "intervall"])
def test_compose_is_what_its_specification_says(slip: str, require_service: Callable[[str], None]) -> None:
    require_service("compose_spec")
    import compose_spec

    def judge(parsed: dict[str, Any]) -> None:
        # With merge keys resolved, as compose does it before it looks.
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(parsed)).to_spec()

    parsed = read_yaml(COMPOSE)
    if not slip:
        judge(parsed)
        return
    broker = parsed["services"]["broker-1"]
    (broker if slip == "healthchek" else broker["healthcheck"])[slip] = "2s"
    with pytest.raises(ValueError, match=slip):
        judge(parsed)


def test_every_store_of_compose_can_be_chosen() -> None:
    stand_alone = {name for name, service in read_yaml(COMPOSE)["services"].items() if service["profiles"] == [name]}
    assert set(STORES) == stand_alone and len(STORES) == 5


@pytest.mark.parametrize("store", STORES)
def test_a_choice_starts_the_cluster_and_that_store_alone(store: str) -> None:
    chosen = services(env_file(store))
    assert set(chosen) == CLUSTER | {store}
    for name in ("broker-1", "broker-2"):
        told = chosen[name]["environment"]
        settings = config.load({}, told)
        assert settings.store.startswith(f"{store}://") and settings.name == name
        make_store(settings.store)  # refuses a URL that cannot be meant
        page = stores_page.told()[store].url
        assert settings.store == page.replace("localhost", store), "as docs/stores.md starts it alone"


def test_brokers_differ_by_name_and_address_alone() -> None:
    first, second = (services(env_file("redis"))[name] for name in ("broker-1", "broker-2"))
    differs = {name for name in first["environment"] if first["environment"][name] != second["environment"][name]}
    assert differs == {"TIMELINE_NAME", "TIMELINE_ADVERTISE"}
    assert {key for key in first if first[key] != second[key]} == {"environment", "ports"}


def test_images_name_their_versions_and_everything_is_watched_and_bound_to_loopback() -> None:
    parsed = read_yaml(COMPOSE)
    for name, service in parsed["services"].items():
        assert re.fullmatch(r"([\w-]+/)?[\w-]+:(latest-)?v?\d[\w.-]*", service["image"]), name
        assert service["healthcheck"]["test"], f"{name}: --wait waits for its health"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "nothing on a network"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in parsed["volumes"]
    assert parsed["services"]["broker-1"]["image"] == f"timeline:{timeline.__version__}"


def test_the_grace_of_a_container_is_longer_than_a_drain() -> None:
    for name in ("broker-1", "broker-2"):
        grace_ms = config.parse_duration_ms(read_yaml(COMPOSE)["services"][name]["stop_grace_period"])
        assert grace_ms > config.ServeConfig().grace_ms


def test_the_image_is_slim_has_no_root_and_knows_how_it_is() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.fullmatch(r"python:3\.1[1-4]\.\d+-slim-\w+", base) for base in bases)
    (user,) = instruction("USER")
    assert int(user) > 0
    assert "/healthz" in " ".join(instruction("HEALTHCHECK")) or "/healthz" in text
    assert instruction("ENTRYPOINT") == ["timeline"] and instruction("CMD") == ["serve"]
    config.load({}, dict(word.split("=", 1) for word in instruction("ENV") if word.startswith("TIMELINE_")))


def test_the_image_is_built_of_what_is_there_and_let_through() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert set(copied) == {line[1:] for line in ignored if line.startswith("!")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(asked.split(",")) <= set(extras)


def test_names_of_services_become_addresses_and_nothing_else_does(tmp_path: Path) -> None:
    whole = Composed(tmp_path, "redis")
    redis, etcd = whole.hosts["redis"], whole.hosts["etcd-1"]
    assert whole.addressed("redis://redis:6379/0") == f"redis://{redis}:6379/0"
    assert whole.addressed("etcd-1=http://etcd-1:2380") == f"etcd-1=http://{etcd}:2380"
    assert len(set(whole.hosts.values())) == len(whole.hosts)
