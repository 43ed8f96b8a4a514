"""Settings that hold for every test."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tests import services, workers
from tests.servers.fixture import Running, running

# No deadline: how long an example takes says something about the machine, nothing about the code. In CI the
# examples are the same on every run, so that a change is judged by itself; elsewhere each run looks further.
hypothesis.settings.register_profile("laptop", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "laptop")

# A shell starts what runs in its background with SIGINT ignored, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers.arrange(items)


def pytest_collection_finish() -> None:
    """What was imported and collected is never garbage: no collection in a test need look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.GroupScheduling | None:
    """For `--dist loadscope`. (xdist 3.8's own loadgroup groups nothing under pytest 9.2.)"""
    return workers.GroupScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture
def require_service() -> Callable[[str], None]:
    """`require_service("flatc")` skips the test where flatc is missing, and fails it where it must not be."""
    return services.require_service


@pytest.fixture(scope="session")
def servers() -> Iterator[Running]:
    """Real servers of this worker: `servers.url(RedisServer)`, `servers.server(RedisServer)`."""
    yield from running()


LOGGERS = ("timeline", "asyncio", "grpc", "uvicorn")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What commands and the simulation do to loggers in the tests' process is undone: others read what is logged."""
    disabled = logging.root.manager.disable
    before = [
        (logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled)
        for logger in map(logging.getLogger, LOGGERS)
    ]
    yield
    for logger, handlers, level, propagate, silent in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = silent
    logging.disable(disabled)
