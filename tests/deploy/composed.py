"""The services of compose.yaml as processes: the same commands, variables and configuration files, each at a loopback
address of its own where its container would have a name. What cannot be had as a program (Grafana) is not started."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.files import DEPLOY, ROOT, read_yaml
from tests.servers.process import Server

COMPOSE = ROOT / "compose.yaml"
DOCKERFILE = ROOT / "Dockerfile"
_numbers = itertools.count()


def env_file(store: str) -> dict[str, str]:
    """What deploy/compose/STORE.env sets."""
    lines = (DEPLOY / "compose" / f"{store}.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def services(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services of the profiles in COMPOSE_PROFILES, `variables` filled in."""

    def filled(found: re.Match[str]) -> str:
        return variables.get(found[1]) or found[2] or ""

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", filled, json.dumps(read_yaml(COMPOSE)["services"]))
    wanted = set(variables["COMPOSE_PROFILES"].split(","))
    return {name: service for name, service in json.loads(text).items() if wanted & set(service["profiles"])}


def instruction(name: str) -> list[str]:
    """The arguments of the Dockerfile's last instruction of this name; of ENV, NAME=value each."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    (*_, found) = re.findall(rf"^{name} (.+)$", text, re.MULTILINE)
    told: list[str] = json.loads(found) if found.startswith("[") else found.split()
    return told


class Part(Server):
    """One service of compose.yaml as a process. `more`: variables that only this test gives it."""

    def __init__(self, whole: Composed, name: str, more: Mapping[str, str]) -> None:
        super().__init__(whole.folder / name)
        self.name = name
        self._whole, self._service, self._more = whole, whole.services[name], more

    @property
    def host(self) -> str:
        """The loopback address that stands for its container."""
        return self._whole.hosts[self.name]

    @property
    def _ours(self) -> bool:
        """Whether it is made of the repository's Dockerfile."""
        return self._service.get("build") == "."

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def command(self) -> Sequence[str]:
        command = self._service.get("command", [])
        words = [self.translated(word) for word in (command.split() if isinstance(command, str) else command)]
        if self._ours:
            assert instruction("ENTRYPOINT") == ["timeline"]
            return [sys.executable, "-m", "timeline", *words]
        if self._service["image"].startswith("prom/prometheus:"):  # whose entry point is the program
            return ["prometheus", *words, f"--web.listen-address={self.host}:9090"]
        program = Path(words[0]).name
        own = ["--bind", self.host] if program == "redis-server" else []
        return [program, *words[1:], *own]

    @property
    def environment(self) -> dict[str, str]:
        image = dict(word.split("=", 1) for word in instruction("ENV")) if self._ours else {}
        told = {**image, **self._service.get("environment", {})}
        kept = {name: self.translated(str(value)) for name, value in told.items() if name != "PATH"}
        return {**kept, "PYTHONPATH": str(ROOT), **self._more}

    def translated(self, text: str) -> str:
        """`text` with this machine's addresses and folders in place of containers'."""
        for volume in self._service.get("volumes", []):
            inside = volume.split(":")[1]
            text = re.sub(rf"(?<![\w/]){inside}(?=/|$)", str(self._inside(inside)), text)
        return self._whole.addressed(text).replace("0.0.0.0", self.host)

    def _inside(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def prepare(self) -> None:
        """Folders in place of volumes; what is mounted from the repository is copied, its addresses translated."""
        for volume in self._service.get("volumes", []):
            source, inside, *_ = volume.split(":")
            if not source.startswith("./"):
                self._inside(inside).mkdir(parents=True)
                continue
            shutil.copytree(ROOT / source, self._inside(inside))
            for path in self._inside(inside).rglob("*"):
                if path.is_file():
                    path.write_text(self._whole.addressed(path.read_text(encoding="utf-8")), encoding="utf-8")

    def ready(self) -> bool:
        """By what its own health check asks, as far as that is HTTP; else by its port."""
        paths = {
            "broker": (9001, "/readyz"),
            "gateway": (9080, "/readyz"),
            "prometheus": (9090, "/-/ready"),
            "etcd": (2379, "/health"),
        }
        kind = self.name.partition("-")[0]
        if kind not in paths:
            self.port = int(self._service["ports"][0].split(":")[-1])
            return self.accepts()
        port, path = paths[kind]
        try:
            with urllib.request.urlopen(f"{self.url}:{port}{path}", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def accepts(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=1.0).close()
        except OSError:
            return False
        return True


class Composed:
    """Everything that `docker compose --env-file deploy/compose/STORE.env up` starts."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.services = services(env_file(store))
        # 127.0.0.0/8 is all this machine's: each process of tests takes a part of its own, so that ports do not clash.
        part = f"127.{20 + os.getpid() % 200}.{1 + (os.getpid() // 200 + next(_numbers)) % 250}"
        self.hosts = {name: f"{part}.{at}" for at, name in enumerate(self.services, start=1)}
        self.parts: dict[str, Part] = {}

    def addressed(self, text: str) -> str:
        """`text` with loopback addresses in place of the names of services, where a port follows."""
        for name, host in self.hosts.items():
            text = re.sub(rf"(?<![\w-]){name}(?=:\d)", host, text)
        return text

    def start(self, *names: str, more: Mapping[str, str] | None = None) -> None:
        """Starts these, all at once, and returns once they are ready."""
        parts = [Part(self, name, more or {}) for name in names]
        self.parts.update(zip(names, parts, strict=True))
        for part in parts:
            part.launch()
        for part in parts:
            part.await_ready()

    def stop(self) -> None:
        """Ends all that was started, the last first."""
        for part in reversed(self.parts.values()):
            part.stop()
