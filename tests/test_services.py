"""The rule for missing services: skipped on a laptop, a failure where they are required."""

from __future__ import annotations

import pytest

from tests import services


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "why_missing", lambda name: f"{name} is not installed")


@pytest.mark.usefixtures("nothing_installed")
def test_missing_service_skips_where_nobody_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(services.VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="flatc is not installed"):
        services.require_service("flatc")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("setting", ["all", "flatc", "prlimit, flatc"])
def test_missing_service_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(services.VARIABLE, setting)
    with pytest.raises(pytest.fail.Exception, match="flatc is not installed"):
        services.require_service("flatc")


@pytest.mark.usefixtures("nothing_installed")
def test_requiring_one_service_leaves_the_others_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(services.VARIABLE, "prlimit")
    with pytest.raises(pytest.skip.Exception):
        services.require_service("flatc")


def test_mistyped_services_are_refused() -> None:
    known = (
        "atheris, beanstalkd, cassandra, chromium, cockroachdb, compose_spec, etcd, etcd_cluster, faketime, flatc, "
        "go, go_client, mysql, netns, node, openssl, postgresql, prlimit, prometheus, redis, redis_cluster, socat, "
        "spark, tmpfs, typescript_client"
    )
    with pytest.raises(ValueError, match=f"flatcc: allowed are all, or any of {known}"):
        services.required("flatcc")
    with pytest.raises(ValueError, match="no such service"):
        services.require_service("flatcc")
