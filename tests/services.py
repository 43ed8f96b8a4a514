"""What tests need from the machine, and what happens when it is not there.

On a laptop a missing service skips the test and says how to get it. Where TIMELINE_REQUIRE_SERVICES is `all`, as
in CI, or a comma-separated list that names the service, the test fails instead: nothing is skipped unnoticed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLE = "TIMELINE_REQUIRE_SERVICES"
CASSANDRA_JARS = Path(__file__).parents[1] / "build" / "cassandra" / "5.0.9" / "lib"
"""Where scripts/services.sh puts them."""
CLIENTS = Path(__file__).parents[1] / "build" / "clients"
"""Where it puts generators of HTTP clients."""


def _missing_program(name: str, package: str) -> str | None:
    if shutil.which(name):
        return None
    return f"{name} is not installed; on Debian or Ubuntu: apt-get install {package}"


def _missing_daemon(name: str, package: str) -> str | None:
    """One that lies where a user's path may not lead."""
    if shutil.which(name, path="/usr/sbin:/usr/bin"):
        return None
    return _missing_program(name, package)


def _missing_tmpfs() -> str | None:
    """Tries it for real: whether a mount is allowed depends on more than the user's id."""
    absent = _missing_program("mount", "mount")
    if absent:
        return absent
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode:
            return f"a small tmpfs cannot be mounted here (run as root): {mounted.stderr.strip()}"
        subprocess.run(["umount", folder], check=True)
    return None


def _missing_netns() -> str | None:
    """Tries it for real, for the same reason."""
    absent = _missing_program("ip", "iproute2") or _missing_program("iptables", "iptables")
    if absent:
        return absent
    name = f"timeline-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here (run as root): {tried.stderr.strip()}"
    rule = ["ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", "1", "-j", "DROP"]
    ruled = subprocess.run(rule, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"iptables cannot be used here: {ruled.stderr.strip()}" if ruled.returncode else None


def _missing_cassandra() -> str | None:
    absent = _missing_program("java", "openjdk-17-jre-headless")
    if absent:
        return absent
    if not CASSANDRA_JARS.is_dir():
        return f"Cassandra's jars are not in {CASSANDRA_JARS}: run make services (it needs Maven)"
    if importlib.util.find_spec("cassandra") is None:
        return "Cassandra's driver is not installed: pip install 'timeline-scheduler[cassandra]'"
    return None


def _missing_go_client() -> str | None:
    absent = _missing_program("go", "golang-go")
    if absent is None and not (CLIENTS / "go" / "oapi-codegen").exists():
        return f"there is no generator of Go clients in {CLIENTS}: run make services (it needs Go 1.26)"
    return absent


def _missing_typescript_client() -> str | None:
    absent = _missing_program("node", "nodejs")
    if absent is None and not (CLIENTS / "typescript" / "done").exists():
        return f"there is no generator of TypeScript clients in {CLIENTS}: run make services (it needs npm)"
    return absent


def _missing_compose_spec() -> str | None:
    if importlib.util.find_spec("compose_spec"):
        return None
    return "compose-spec is not installed: there are wheels for CPython 3.11 to 3.13 on Linux, x86-64; run make setup"


def _missing_faketime() -> str | None:
    """Its library is what is needed."""
    if any(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")):
        return None
    return "libfaketime is not installed; on Debian or Ubuntu: apt-get install faketime"


def _missing_atheris() -> str | None:
    if importlib.util.find_spec("atheris"):
        return None
    return "atheris is not installed: it has wheels for CPython 3.11 to 3.13 on Linux, x86-64; there run make setup"


def _missing_spark() -> str | None:
    absent = _missing_program("java", "openjdk-17-jre-headless")
    if absent is None and importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed: pip install 'timeline-scheduler[spark]'"
    return absent


def _missing_postgresql() -> str | None:
    """Debian keeps the server's programs off the path."""
    if any(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        return None
    return _missing_program("postgres", "postgresql")


_WHY_MISSING: dict[str, Callable[[], str | None]] = {
    "atheris": _missing_atheris,
    "beanstalkd": lambda: _missing_daemon("beanstalkd", "beanstalkd"),
    "cassandra": _missing_cassandra,
    "chromium": lambda: _missing_program("chromium", "chromium"),
    "cockroachdb": _missing_postgresql,  # which stands in for it
    "compose_spec": _missing_compose_spec,
    "etcd": lambda: _missing_program("etcd", "etcd-server") or _missing_program("etcdctl", "etcd-client"),
    "etcd_cluster": lambda: _missing_program("etcd", "etcd-server"),
    "faketime": _missing_faketime,
    "flatc": lambda: _missing_program("flatc", "flatbuffers-compiler"),
    "go": lambda: _missing_program("go", "golang-go"),
    "go_client": _missing_go_client,
    "netns": _missing_netns,
    "node": lambda: _missing_program("node", "nodejs"),
    "openssl": lambda: _missing_program("openssl", "openssl"),
    "postgresql": _missing_postgresql,
    "redis": lambda: _missing_program("redis-server", "redis-server"),
    "mysql": lambda: _missing_daemon("mariadbd", "mariadb-server"),
    "redis_cluster": lambda: (
        _missing_program("redis-cli", "redis-tools") or _missing_program("redis-server", "redis-server")
    ),
    "prlimit": lambda: _missing_program("prlimit", "util-linux"),
    "prometheus": lambda: _missing_program("prometheus", "prometheus"),
    "socat": lambda: _missing_program("socat", "socat") or _missing_program("xxd", "xxd"),
    "spark": _missing_spark,
    "tmpfs": _missing_tmpfs,
    "typescript_client": _missing_typescript_client,
}
KNOWN = frozenset(_WHY_MISSING)


@functools.cache
def why_missing(name: str) -> str | None:
    """None when the service can be used, else a sentence that says what is missing and how to get it."""
    return _WHY_MISSING[name]()


def required(setting: str | None) -> frozenset[str]:
    """The services that must be there, from the variable's value; ValueError for one that nobody knows."""
    names = frozenset(name.strip() for name in (setting or "").split(",") if name.strip())
    if names == {"all"}:
        return KNOWN
    unknown = names - KNOWN
    if unknown:
        allowed = ", ".join(sorted(KNOWN))
        raise ValueError(f"{VARIABLE}: {', '.join(sorted(unknown))}: allowed are all, or any of {allowed}")
    return names


def require_service(name: str) -> None:
    """Returns when the service `name` is there; otherwise skips the test, or fails it where required."""
    if name not in KNOWN:
        raise ValueError(f"{name}: no such service; known are {', '.join(sorted(KNOWN))}")
    reason = why_missing(name)
    if reason is None:
        return
    if name in required(os.environ.get(VARIABLE)):
        pytest.fail(f"{VARIABLE} asks for {name}: {reason}", pytrace=False)
    pytest.skip(reason)
