"""The rule for missing services: skipped on a laptop, a failure where they are required."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import services

ROOT = Path(__file__).parents[1]


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


@pytest.mark.slow
def test_mistyped_services_are_refused() -> None:
    known = ", ".join(sorted(services.KNOWN))
    assert "flatc, " in known
    with pytest.raises(ValueError, match=f"flatcc: allowed are all, or any of {known}$"):
        services.required("flatcc")
    with pytest.raises(ValueError, match="no such service"):
        services.require_service("flatcc")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A path with nothing that could be installed, and nothing to install it by."""
    for program in ("bash", "dirname", "id", "paste", "sort"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    return tmp_path


def installing(path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """The script by which `make` installs services."""
    command = [str(ROOT / "scripts" / "services.sh"), *names]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def test_what_is_named_alone_is_installed(bare: Path) -> None:
    """The cluster's demo needs etcd and Redis: no Java, no compiler, and nothing from the network besides."""
    done = installing(bare, "etcd", "redis-server")
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert sorted(said.partition("apt-get install -y ")[2].split()) == ["etcd-server", "redis-server"]


def test_a_name_that_the_script_does_not_know_is_refused(bare: Path) -> None:
    done = installing(bare, "etcdd")
    assert done.returncode == 2
    assert "etcdd is none of these: beanstalkd cassandra " in done.stderr


def test_the_demo_of_a_cluster_installs_what_it_needs() -> None:
    def commands(*words: str) -> str:
        return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "services.sh etcd redis-server\n" in commands("run", "CLUSTER=1")
    assert "services.sh" not in commands("run")
