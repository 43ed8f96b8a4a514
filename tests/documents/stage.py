"""Where the blocks of a page are executed: one broker as a person starts it, one namespace a page."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import click

import timeline
from tests.documents.pages import ROOT, Block
from timeline.cli.app import cli, run

ADDRESS, METRICS, HTTP = "localhost:9000", "localhost:9001", "localhost:9080"
"""What pages say; the broker and the gateway under test have other ports."""
_SHELLS_OWN = re.compile(r"[|$;<>&]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Served:
    """A running broker and its gateway: their addresses, and the folder that they were started in."""

    listen: str
    metrics: str
    http: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For commands: `timeline` in the path, and this broker as the one that they ask."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), kept["PATH"]])
        python = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        return kept | {"PATH": path, "PYTHONPATH": python, "TIMELINE_ADDRESS": self.listen}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """`timeline serve` and `timeline gateway` in `folder`, on free ports, until SIGTERM."""
    script = folder / "bin" / "timeline"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m timeline "$@"\n')
    script.chmod(0o755)
    with (
        _started(folder, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0") as broker,
        _started(folder, "gateway", "--broker", broker["listen"], "--listen", "127.0.0.1:0") as gateway,
    ):
        yield Served(broker["listen"], broker["metrics"], gateway["listen"], folder)


@contextlib.contextmanager
def _started(folder: Path, *words: str) -> Iterator[dict[str, str]]:
    """What the command announces once it serves."""
    command = [str(folder / "bin" / "timeline"), *words, "--log-level", "warning", "--json"]
    environment = Served("", "", "", folder).environment
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
    assert code == 0


@dataclass
class Stage:
    """Executes the blocks of one page, in order. `said`: what the last block printed."""

    served: Served
    namespace: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    async def play(self, block: Block) -> None:
        """Executes a block; of `text`, holds it against what the block before it printed."""
        if block.language == "text":
            told = block.said == "for example" or plain(block.body) == plain(self.said)
            assert told, f"{block.place}: not what was printed:\n{self.said}"
        elif block.language == "python":
            await self._python(block)
        elif block.language == "sh":
            understand(block)
            if block.runs:
                await self._shell(block)

    async def close(self) -> None:
        """Closes the page's client, where the page did not come so far."""
        if isinstance(client := self.namespace.get("tl"), timeline.Timeline):
            await client.aclose()

    async def _python(self, block: Block) -> None:
        code = compiled(block, self.served.listen, self.served.metrics)
        if not block.runs:
            return
        lines: list[str] = []

        def told(*values: object, **options: Any) -> None:
            lines.append(" ".join(map(str, values)))
            if block.until is not None and block.until in lines[-1]:
                self.namespace["c"].stop_taking()

        self.namespace["print"] = told
        if "connect_sync(" in block.body:  # its calls are refused in the thread of an event loop
            done = await asyncio.to_thread(eval, code, self.namespace)
        else:
            done = eval(code, self.namespace)
        if inspect.isawaitable(done):
            await done
        self.said = "\n".join(lines)
        assert block.until is None or block.until in self.said, f"{block.place} ended without printing {block.until!r}"

    async def _shell(self, block: Block) -> None:
        said = []
        for line in commands(block):
            if _SHELLS_OWN.search(line) or not line.startswith("timeline "):
                said.append(await self._bash(line.replace(HTTP, self.served.http), block))
            else:
                said.append(await asyncio.to_thread(self._here, shlex.split(line)[1:], block))
        self.said = "".join(said)

    async def _bash(self, line: str, block: Block) -> str:
        process = await asyncio.create_subprocess_exec(
            "bash", "-euc", line, cwd=self.served.folder, env=self.served.environment, stdout=-1, stderr=-1
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, f"{block.place}: {line}: {errors.decode()}"
        return out.decode()

    def _here(self, words: list[str], block: Block) -> str:
        """In this process, which saves starting one."""
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = run(words)
        assert code == 0, f"{block.place}: timeline {shlex.join(words)}: {errors.getvalue()}"
        return out.getvalue()


def compiled(block: Block, listen: str = ADDRESS, metrics: str = METRICS) -> Any:
    """The block's code, which may await at its top level; its lines are the page's."""
    source = "\n" * (block.line - 1) + block.body.replace(ADDRESS, listen).replace(METRICS, metrics)
    return compile(source, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def commands(block: Block) -> list[str]:
    """The commands of a shell block, without comments; one that goes on in the next line is one."""
    return [
        line
        for line in block.body.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def understand(block: Block) -> None:
    """Raises click's usage error unless each `timeline …` of a shell block has its right form."""
    for line in commands(block):
        words = shlex.split(line.split("|")[-1], comments=True)
        variables: dict[str, str] = {}
        while words and (_VARIABLE.match(words[0]) or words[0] == "&"):
            variable, _, value = words.pop(0).partition("=")
            variables[variable] = value
        if not words or words[0].rpartition("/")[2] != "timeline":
            continue
        end = min((words.index(mark) for mark in (">", "&") if mark in words), default=len(words))
        words = words[1:end]
        words = ["memory://" if word.startswith("@") else word for word in words]  # a file with a URL, to be made first
        with mock.patch.dict(os.environ, variables):
            context = cli.make_context("timeline", list(words))
            while isinstance(context.command, click.Group):
                name, command, rest = context.command.resolve_command(
                    context, [*context._protected_args, *context.args]
                )
                assert name is not None and command is not None
                context = command.make_context(name, rest, parent=context)


def plain(text: str) -> list[str]:
    """Lines without what differs from run to run: digits and the width of columns."""
    return [" ".join(re.sub(r"\d+", "0", line).split()) for line in text.strip().splitlines()]
