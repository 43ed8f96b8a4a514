"""Brokers as machines of their own: each in a network namespace, joined by a bridge to where everything else runs, and
cut off by rules of iptables in its own namespace, one way or both. Packets are lost, and nobody is told."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INWARDS, OUTWARDS = "in", "out"
NETS = "198.18"
"""Addresses that are set apart for tests of networks (RFC 2544)."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


class Lan:
    """`host`: the address of everything that is in no namespace. `places`: the address of each machine."""

    def __init__(self, machines: Sequence[str]) -> None:
        taken = _run("ip", "-o", "address")
        net = next(number for number in range(256) if f" {NETS}.{number}." not in taken)
        self._name = f"tl{net}"
        self.host = f"{NETS}.{net}.1"
        self.places = {name: f"{NETS}.{net}.{number}" for number, name in enumerate(machines, start=11)}
        self._made: list[tuple[str, ...]] = []
        """What takes away again what was made."""

    def inside(self, machine: str) -> tuple[str, ...]:
        """What runs a command on that machine."""
        return "ip", "netns", "exec", f"{self._name}{machine}"

    def make(self) -> None:
        """Raises with what `ip` says where it may not."""
        bridge = f"{self._name}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        self._made.append(("ip", "link", "del", bridge))
        _run("ip", "address", "add", f"{self.host}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for machine, address in self.places.items():
            space, cable = f"{self._name}{machine}", f"{self._name}{machine}"
            _run("ip", "netns", "add", space)
            self._made.append(("ip", "netns", "del", space))
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", cable, "master", bridge, "up")
            _run(*self.inside(machine), "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run(*self.inside(machine), "ip", "link", "set", link, "up")

    def end(self) -> None:
        """Takes all of it away. What runs on a machine has to end first."""
        for command in reversed(self._made):
            _run(*command)

    def cut(self, machine: str, far: str, port: int | None = None, ways: Sequence[str] = (INWARDS, OUTWARDS)) -> None:
        """From now on nothing gets from `machine` to `far` (and that port of it), or back."""
        there = ("-p", "tcp", "--dport", str(port)) if port else ()
        back = ("-p", "tcp", "--sport", str(port)) if port else ()
        if OUTWARDS in ways:
            _run(*self.inside(machine), "iptables", "-A", "OUTPUT", "-d", far, *there, "-j", "DROP")
        if INWARDS in ways:
            _run(*self.inside(machine), "iptables", "-A", "INPUT", "-s", far, *back, "-j", "DROP")

    def mend(self, machine: str) -> None:
        """Everything gets through again."""
        _run(*self.inside(machine), "iptables", "-F")


@contextmanager
def lan(*machines: str) -> Iterator[Lan]:
    """A network of these machines, and its end."""
    made = Lan(machines)
    try:
        made.make()
        yield made
    finally:
        made.end()
