"""The gateway beside a broker: a process of its own, started again when it dies.

JSON never runs in a broker's loop, where it would become lateness. The gateway reaches the broker like any client. It
ends when its standard input does, because then the broker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import signal
import sys

from timeline.broker.server.process import RestartDelay, check_free
from timeline.child import send_signal
from timeline.config import HTTP, ServeConfig, local_address
from timeline.errors import Invalid
from timeline.wording import install_command

log = logging.getLogger("timeline.broker")

COMMAND = (sys.executable, "-P", "-m", "timeline", "gateway")
END_S = 5.0
"""How much longer than its grace it may take to end before it is killed."""
GRACE_SHARE = 2 / 3
"""Its part of the broker's grace. The broker drains after it."""
HOPELESS = (2, 4)
"""Exit codes of a gateway that will not start next time either. Its last line says why."""
PACKAGES = ("litestar", "msgspec", "uvicorn", "aiohttp", "jinja2")


def command_of(config: ServeConfig) -> tuple[str, ...]:
    """Return the command of the gateway for a broker that listens on `config.listen`."""
    given = {
        "--broker": config.advertise if config.tls_cert else local_address(config.listen),
        "--listen": config.http, "--grace": f"{int(config.grace_ms * GRACE_SHARE)}ms",
        "--log-level": config.log_level, "--log-format": config.log_format,
        "--tls-cert": config.tls_cert, "--tls-key": config.tls_key,
        "--broker-ca": config.tls_ca if config.tls_cert else "",
        "--broker-cert": config.tls_cert if config.client_ca else "",
        "--broker-key": config.tls_key if config.client_ca else "",
        "--push-token-file": config.push_token_file,
    }  # fmt: skip
    pairs = [*given.items(), *(("--push-allow", network) for network in config.push_networks)]
    flags = {"--until-input-ends": True, "--broker-tls": config.tls_cert, "--insecure": config.insecure}
    options = (word for name, value in pairs if value for word in (name, value))
    return (*COMMAND, *options, *(flag for flag, wanted in flags.items() if wanted))


def missing_package() -> str:
    """Return which package the gateway lacks, and how to install it. Empty: none."""
    missing = next((name for name in PACKAGES if importlib.util.find_spec(name) is None), "")
    return missing and f"{missing}: {install_command('gateway')}"


def gateway_for(config: ServeConfig) -> GatewayProcess | None:
    """Return the gateway that `config` wants. None: there is none.

    A broker on its own default address has one without being asked, unless a package or the port is missing. Raise
    Invalid if `config` asks for one and a package is missing.
    """
    if config.http == "off" or not (config.http or config.listen == ServeConfig().listen):
        return None
    if missing := missing_package():
        if config.http:
            raise Invalid(f"http {config.http} needs a package that is not installed: {missing}")
        log.info("no HTTP: it needs %s", missing)
        return None
    if config.http:
        return GatewayProcess(config)
    try:
        check_free(HTTP)
    except OSError as taken:
        log.warning("no HTTP: %s: %s. Choose another: --http HOST:PORT", HTTP, (taken.strerror or "").lower())
        return None
    return GatewayProcess(dataclasses.replace(config, http=HTTP))


def address_of(gateway: GatewayProcess | None) -> str:
    """Return where a gateway listens, "off" if there is none."""
    return "off" if gateway is None else gateway.address


class GatewayProcess:
    """Keeps one gateway running. `config`: the broker's, with the port that it has."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.address = config.http
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it, and again whenever it ends. Raise OSError, its `filename` the address, if that is taken."""
        check_free(self._config.http)
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End it after the requests under way, within its share of the grace."""
        if self._keeping is None:
            return
        keeping, self._keeping = self._keeping, None
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        send_signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._config.grace_ms * GRACE_SHARE / 1000.0 + END_S)
        except TimeoutError:
            log.warning("the gateway did not end in time and is killed")
            send_signal(process, signal.SIGKILL)
            await process.wait()

    async def _keep(self) -> None:
        delay, ever = RestartDelay(), False
        while True:
            delay.begins()
            try:
                served, code = await self._run()
            except OSError as cannot:  # no memory, or no descriptor, now
                log.error("the gateway cannot be started, and is tried again: %s", cannot.strerror)
            else:
                ever |= served
                if not ever and code in HOPELESS:
                    log.error("there is no HTTP on %s: the gateway cannot start, see above", self._config.http)
                    return
                log.warning("the gateway ended with code %s and is started again", code)
            await asyncio.sleep(delay.after_end())

    async def _run(self) -> tuple[bool, int]:
        """Run it to its end. Return whether it served, and its exit code."""
        pipe = asyncio.subprocess.PIPE
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}
        self._process = process = await asyncio.create_subprocess_exec(
            *command_of(self._config), stdin=pipe, stdout=pipe, env=kept
        )
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode(errors="replace").strip()
        if said:
            log.info("%s", said, extra={"gateway_pid": process.pid})
        with contextlib.suppress(ConnectionError):
            await process.stdout.read()  # it says nothing more: this ends with it
        return bool(said), await process.wait()
