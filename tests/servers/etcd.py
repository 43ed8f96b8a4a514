"""etcd as processes: one member, or a cluster of three."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.servers.process import Server, free_port


class EtcdServer(Server):
    """One member. `settings`: more of its options, as they stand on a command line. `peers`: all members of its cluster
    by name, with their peer ports."""

    name = "etcd"
    scheme = "http"

    def __init__(self, folder: Path, *settings: str, member: str = "m1", peers: dict[str, int] | None = None) -> None:
        super().__init__(folder)
        self.settings = settings
        self.member = member
        self.peers = peers or {member: free_port()}
        self.health_port = free_port()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"etcd://{self.endpoint}"

    @property
    def data(self) -> Path:
        """Where its data lies."""
        return self.folder / "data"

    @property
    def command(self) -> Sequence[str]:
        here, peer = f"{self.scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peers[self.member]}"
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in self.peers.items())
        return [
            *("etcd", "--name", self.member, "--data-dir", str(self.data)),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster),
            *(
                "--listen-metrics-urls",
                f"http://127.0.0.1:{self.health_port}",
                "--logger",
                "zap",
                "--log-level",
                "warn",
            ),
            *self.settings,
        ]

    def ready(self) -> bool:
        """Whether it answers, with a quorum."""
        asked = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=2.0)
        try:
            asked.request("GET", "/health")
            return json.loads(asked.getresponse().read()).get("health") == "true"
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            asked.close()

    def empty(self) -> None:
        """Loses all its data; not while it runs."""
        shutil.rmtree(self.data)

    def etcdctl(self, *arguments: str) -> str:
        """What etcdctl prints."""
        done = subprocess.run(
            ["etcdctl", "--endpoints", f"{self.scheme}://{self.endpoint}", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"etcdctl {arguments}: {done.stdout}{done.stderr}")
        return done.stdout


class EtcdClusterServer(Server):
    """Three members. `process` is the first one's."""

    name = "etcd_cluster"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        peers = {f"m{number}": free_port() for number in (1, 2, 3)}
        self.members = [EtcdServer(folder / name, member=name, peers=peers) for name in peers]

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.endpoint for member in self.members)

    @property
    def command(self) -> Sequence[str]:
        return self.members[0].command

    def ready(self) -> bool:
        return all(member.ready() for member in self.members)

    def start(self) -> Self:
        """Starts those that do not run; ready once all have a quorum. One alone never is, so they start together."""
        for member in self.members:
            member.launch()
        self.process = self.members[0].process
        for member in self.members:
            member.await_ready()
        return self

    def stop(self) -> None:
        """At once: a member that ends in order looks for another one to lead, which may have ended already."""
        self.kill()

    def kill(self) -> None:
        for member in self.members:
            member.kill()
