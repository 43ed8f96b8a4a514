"""What the commands of `timeline pipeline` share: a Spark session, its errors in one line, and its progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from timeline.cli.app import REFUSED, UNREACHABLE, Failed
from timeline.cli.identity import address_option
from timeline.cli.progress import Progress
from timeline.errors import Invalid
from timeline.pipeline.connection import first_line

F = TypeVar("F", bound=Callable[..., Any])
_OURS = re.compile(r"timeline\.errors\.(\w+): (?:[A-Z_]+: )?(.+)")
RETRYABLE = ("Unavailable", "Unknown", "Throttled")


def pipeline_command(command: F) -> F:
    """Adds what all commands take: `--json --master --set --address`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option(
            "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; repeatable."
        ),
        click.option("--master", default="", metavar="URL", help="Spark's master.  [local[*], or spark-submit's]"),
        address_option,
    ):
        command = option(command)
    return command


@contextmanager
def running(name: str, master: str, settings: tuple[str, ...]) -> Iterator[Any]:
    """A session; errors out of Spark's depths become one line."""
    try:
        from timeline.pipeline.session import spark_session
    except ModuleNotFoundError as missing:
        raise Failed(
            REFUSED, f"pipelines need {missing.name}, which is not installed: pip install 'timeline[spark]'"
        ) from missing
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    pairs = dict(pair(setting) for setting in settings)
    try:
        spark = spark_session(f"timeline pipeline {name}", master, pairs)
    except (PySparkException, RuntimeError, OSError) as failed:
        raise Failed(
            REFUSED, f"Spark does not start: {first_line(failed)}. It needs Java 17 (JAVA_HOME, or java on the PATH)"
        ) from failed
    try:
        yield spark
    except (PySparkException, Py4JError) as failed:
        kind, said = _ours(failed)
        raise Failed(UNREACHABLE if kind in RETRYABLE else REFUSED, said) from failed
    except Invalid as bad:
        raise Failed(REFUSED, bad.reason) from bad
    finally:
        spark.stop()


def pair(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{setting!r} is no NAME=VALUE", param_hint="--set")
    return name, value


def _ours(failed: BaseException) -> tuple[str, str]:
    """Kind and sentence of the error of ours that Spark wraps, else Spark's own first line."""
    found = _OURS.findall(str(failed))
    return found[-1] if found else ("", first_line(failed))


class Watch:
    """Draws what a job says of its progress."""

    def __init__(self) -> None:
        self._what = ""
        self._progress: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._progress is None or what != self._what:
            self.clear()
            self._what, self._progress = what, Progress(what, total or None)
        self._progress.add(max(0, done - self._progress.done), done / total if total else None)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.clear()


@contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    try:
        yield watch
    finally:
        watch.clear()
