"""What the commands of `timeline pipeline` share: a Spark session, its errors in one line, and its progress."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from timeline.cli.app import REFUSED, UNREACHABLE, Failed, debugs
from timeline.cli.options.client_options import address_option, credential_options, credentials
from timeline.cli.terminal.progress import Progress
from timeline.credentials import Credentials
from timeline.errors import Invalid
from timeline.pipeline.connection import first_line

_OURS = re.compile(r"timeline\.errors\.(\w+): (?:[A-Z_]+: )?(.+)")
RETRYABLE = ("Unavailable", "Unknown", "Throttled")


def pipeline_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what all commands take: `--json --master --set --address`, and who we are (`credential_options`)."""

    @functools.wraps(command)
    def as_asked(**given: Any) -> Any:
        with said_to_workers(credentials()):
            return command(**given)

    asked: Callable[..., Any] = as_asked
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option(
            "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; repeatable."
        ),
        click.option("--master", default="", metavar="URL", help="Spark's master.  [local[*], or spark-submit's]"),
        address_option,
    ):
        asked = option(asked)
    return credential_options(asked)


@contextmanager
def said_to_workers(shown: Credentials) -> Iterator[None]:
    """What the options say of who we are, as the variables of this process, which Spark's workers on this machine
    inherit: a plan would show it. A token's text is among the variables already, for no option takes it."""
    files = {"TLS_CA": shown.ca, "TLS_CERT": shown.cert, "TLS_KEY": shown.key, "TOKEN_FILE": shown.token_file}
    said = {f"TIMELINE_{name}": os.path.abspath(file) for name, file in files.items() if file}
    if shown.tls:
        said["TIMELINE_TLS"] = "true"
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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

    # Whatever Spark writes of a failure in its log, pages of it, is said in one line here.
    pairs = {"spark.log.level": "ERROR" if debugs() else "FATAL"} | dict(pair(setting) for setting in settings)
    try:
        spark = spark_session(f"timeline pipeline {name}", master, pairs)
    except (PySparkException, RuntimeError, OSError) as failed:
        raise Failed(
            REFUSED, f"Spark does not start: {first_line(failed)}. It needs Java 17 (JAVA_HOME, or java on the PATH)"
        ) from failed
    try:
        yield spark
    except (PySparkException, Py4JError) as failed:
        kind, said = ours(failed)
        said = as_options(said) if name == "load" else said
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


def ours(failed: BaseException) -> tuple[str, str]:
    """Kind and sentence of the error of ours that Spark wraps, else Spark's own first line."""
    found = _OURS.findall(str(failed))
    return found[-1] if found else ("", first_line(failed))


def as_options(said: str) -> str:
    """A sentence of the data source's as one of `timeline pipeline load`, whose options have other names."""
    said = said.replace("maxRejects=", "--max-rejects ").replace("rejectsPath keeps them", "--rejects URL keeps them")
    if "FORBIDDEN" in said and "--group" not in said:
        said += ". What belongs to another group is put in its name: --group NAME"
    return said


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
