"""The root of the command line: finds commands, explains mistakes, turns errors into one line and an exit code."""

from __future__ import annotations

import asyncio
import difflib
import errno
import io
import json
import logging
import os
import platform
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeGuard

import click
from click.shell_completion import CompletionItem

from timeline import __version__
from timeline.errors import Closed, Exists, Forbidden, Invalid, NotFound, TimelineError, Unavailable, Unknown
from timeline.wording import printable

DONE, SOME_FAILED, USAGE, UNREACHABLE, REFUSED = 0, 1, 2, 3, 4
INTERRUPTED = 130
INTERRUPTED_SAID = "interrupted"

COMMANDS = {
    "serve": ("timeline.cli.run.serve", "Run a broker"),
    "topic": ("timeline.cli.topic", "Create, change and list topics"),
    "produce": ("timeline.cli.messages.produce", "Put messages on a timeline"),
    "consume": ("timeline.cli.messages.consume", "Take messages when they come due"),
    "move": ("timeline.cli.messages.change", "Move messages to another time"),
    "cancel": ("timeline.cli.messages.change", "Take messages off the timeline"),
    "show": ("timeline.cli.messages.read", "One message with all that is known of it"),
    "ls": ("timeline.cli.messages.read", "A topic's messages"),
    "forecast": ("timeline.cli.look.forecast", "Draw how much comes due, and when"),
    "late": ("timeline.cli.look.late", "What was late, and why"),
    "why": ("timeline.cli.look.why", "Why one message was late, or is not delivered yet"),
    "dead": ("timeline.cli.messages.dead", "Dead letters: list, revive, purge"),
    "top": ("timeline.cli.look.top", "Watch brokers live: load, consumers, lateness"),
    "cluster": ("timeline.cli.look.cluster", "All brokers on one screen: load, clocks, who deals what"),
    "token": ("timeline.cli.run.token", "Who may do what: create, list and revoke tokens"),
    "doctor": ("timeline.cli.look.doctor", "Is everything as it should be, and what to do where not"),
    "outbox": ("timeline.cli.data.outbox", "Send what a transaction added, once it has committed"),
    "check-store": ("timeline.cli.tools.check_store", "Prove a store against the storage contract"),
    "store": ("timeline.cli.data.store", "Bring a store's schema to this version, and leave the last one behind"),
    "copy": ("timeline.cli.data.copy", "Move house: topics from one store into another"),
    "bench": ("timeline.cli.tools.bench", "Measure speed and lateness on this machine"),
    "demo": ("timeline.cli.run.demo", "Watch a real day of departures go out on time"),
    "pipeline": ("timeline.cli.data.pipeline", "Load, back up, forecast and audit by the million, on Spark"),
    "completion": ("timeline.cli.options.completion", "Completion for bash, zsh and fish"),
    "version": ("timeline.cli.app", "The version of this package"),
}
"""Command name → (module that has it, one line). A command's module is imported when it is used."""


_ONLY_KIND = " 'timeline' is the only kind of topic there is"
_PAUSE = " 'timeline topic pause NAME' pauses a topic that is there, 'topic resume' ends it"
_CREATE, _UPDATE = "timeline topic create", "timeline topic update"
INSTEAD = {
    (_CREATE, "--kind"): _ONLY_KIND,
    (_CREATE, "--paused"): _PAUSE,
    (_UPDATE, "--paused"): _PAUSE,
    (_UPDATE, "--buckets"): f" A topic's buckets are fixed when it is created: '{_CREATE} NAME --buckets N'",
    (_UPDATE, "--kind"): f" A topic's kind is fixed when it is created, and{_ONLY_KIND}",
}
"""Command and option that one may expect of it → what there is instead: no other option of it would do."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` Did you mean …?` for the nearest of `known`, or nothing. Hyphens at the beginning would make any two
    options alike."""
    bare = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.65)
    return f" Did you mean {bare[near[0]]}?" if near else ""


class Failed(Exception):
    """Ends a command with `code`, saying `reason` (empty: all is said already)."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Suggesting(click.Group):
    """A group that names the nearest command when one is mistyped."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as bad:
            # Click says of an option without its value, or with one too many, no command that it belongs to.
            name = context.invoked_subcommand
            command = None if bad.ctx is not None or name is None else self.get_command(context, name)
            if command is not None:
                bad.ctx = click.Context(command, parent=context, info_name=name)
            raise

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        completing = context.resilient_parsing  # into the line that a person is typing nothing is said
        if self.get_command(context, name) is None and not name.startswith("-") and not completing:
            known = self.list_commands(context)
            hint = nearest(name, [*known, "--help"]) or f" There are: {', '.join(known)}."
            raise click.UsageError(f"there is no command {name!r}.{hint}", context)
        return super().resolve_command(context, args)


class Root(Suggesting):
    """The commands of `COMMANDS`, each imported when it is used, so that a client command needs no broker package."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = import_module(COMMANDS[name][0])
        found = getattr(module, name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        return [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _tell_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        say(f"timeline {__version__}")
        context.exit()


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show where an error came from.")
@click.option(
    "--version",
    "told",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_version,
    help="Print the version and end.",
)
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Timeline: put a message on a timeline, have it pushed to one consumer at its time, never before.

    \b
    Example:
      timeline serve &
      timeline topic create departures
      timeline produce departures "gate closes" --in 10s --id UA1545
      timeline consume departures --count 1

    Exit codes: 0 done, 1 some failed, 2 usage, 3 unreachable, 4 refused, 130 after Ctrl-C.
    """
    context.obj = {"debug": debug}


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def version(as_json: bool) -> None:
    """The version of this package, of its wire, and of the Python that runs it.

    \b
    Example:
      timeline version --json
    """
    if as_json:
        from timeline.wire import MAJOR, MINOR

        wire = f"{MAJOR}.{MINOR}"
        say(json.dumps({"version": __version__, "wire": wire, "python": platform.python_version()}))
    else:
        say(f"timeline {__version__}")


def exit_code_of(error: TimelineError) -> int:
    """The exit code that an error means: nobody there, or refused by somebody who is."""
    if isinstance(error, Invalid):
        return USAGE
    return UNREACHABLE if isinstance(error, (Unavailable, Unknown, Closed)) else REFUSED


def explain(error: TimelineError) -> str:
    """The error in one line, with what to do about it."""
    said = error.reason or error.advice
    about = f" {error.id!r}" if error.id is not None else ""
    code = "" if isinstance(error, Invalid) else f"{error.code}{about}: "
    # What NOT_FOUND, EXISTS and FORBIDDEN advise is about a message; without an id they speak of a topic, or of a call.
    fits = error.id is not None or not isinstance(error, Exists | Forbidden | NotFound)
    # A reason for FORBIDDEN says which right is missing; the advice is for what belongs to another group, without one.
    whole = isinstance(error, Invalid | Forbidden) or error.lasting
    if not error.reason or not fits or error.advice in said or whole:
        return f"{code}{said}".replace("\n", " ")
    known, _, todo = error.advice.partition(": ")
    # A reason may say the first half of the advice in the very same words.
    return f"{code}{said.removesuffix('.')}; {todo if todo and known in said else error.advice}".replace("\n", " ")


def debugs() -> bool:
    """Return whether the command that runs now was asked for tracebacks."""
    context = click.get_current_context(silent=True)
    return context is not None and bool((context.find_root().obj or {}).get("debug"))


def say(*lines: str, err: bool = False) -> None:
    """Print each of `lines` on one line, printable, on standard output, or on standard error with `err`."""
    # Named, since click takes an output in ASCII for one in UTF-8.
    click.echo("\n".join(map(printable, lines)), file=sys.stderr if err else sys.stdout)


def complain(text: str) -> None:
    """Print one line on standard error."""
    say(f"timeline: {text}", err=True)


class Unwritten(OSError):
    """Standard output could not be written. An OSError alone does not say whether a disk is full that the command
    works on, or the one that its report goes to, for which much may have been done already."""


class _Named(io.FileIO):
    """A file whose failures say that it was this one. That nobody reads any more (`| head`) is told as ever."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except BrokenPipeError:
            raise
        except OSError as cannot:
            raise Unwritten(cannot.errno, cannot.strerror) from cannot
        if written is None:  # a pipe that does not wait, and is full
            raise Unwritten(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


@contextmanager
def told_apart() -> Iterator[None]:
    """Within it, standard output raises Unwritten where it cannot be written, at its end for what is left."""
    plain = sys.stdout
    if not _is_a_file(plain):  # what took its place is for whoever put it there
        yield
        return
    sys.stdout = named = _named(plain)
    try:
        yield
        named.flush()
    except Unwritten:
        # What is left in it goes nowhere: Python would try once more as it ends, and complain in words of its own.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, named.fileno())
        os.close(null)
        raise
    finally:
        if sys.stdout is named:  # else click has put one there that forgives a pipe that nobody reads
            sys.stdout = plain


def _is_a_file(stream: object) -> TypeGuard[io.TextIOWrapper]:
    """Whether it is as Python begins with it: text over bytes over a file, or, unbuffered, over the file itself."""
    if type(stream) is not io.TextIOWrapper:
        return False
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO)


def _named(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same output, with a lowest layer that is ours: whoever goes past the others (`buffer`) meets it as well."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Named(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Printable(logging.Formatter):
    """Formats what the driver logs in a process that has set up no logging."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join(map(printable, [record.getMessage(), *trace]))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line with `arguments` (default: the process's) and returns its exit code."""
    listed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in listed
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    try:
        with told_apart():
            return _answer(listed, debug)
    except Unwritten as cannot:
        if debug:
            raise
        # Not as something refused: a script would repeat what may have been done.
        complain(
            f"standard output cannot be written: {cannot.strerror}. What was asked for may have been done all "
            "the same: look before you repeat it"
        )
        return SOME_FAILED


def _answer(listed: list[str], debug: bool) -> int:
    """Runs a command and says what there is to say of its errors; the exit code. Raises Unwritten."""
    try:
        # When nobody reads the output any more (`timeline ls t | head`), click ends the process quietly, with 1.
        answer = cli.main(listed, prog_name="timeline", standalone_mode=False)
        if answer == INTERRUPTED:
            complain(INTERRUPTED_SAID)
        return answer if isinstance(answer, int) else DONE
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message())
        return USAGE
    except click.ClickException as bad:
        complain(_usage(bad))
        return USAGE
    except Failed as failed:
        if debug and failed.__cause__ is not None:
            raise failed.__cause__ from None
        if str(failed):
            complain(str(failed))
        return failed.code
    except TimelineError as error:
        if debug:
            raise
        complain(explain(error))
        return exit_code_of(error)
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        # What was cut off is no error to tell of.
        logging.getLogger("asyncio").disabled = True
        complain(INTERRUPTED_SAID)
        return INTERRUPTED
    except OSError as error:
        if debug or isinstance(error, Unwritten):
            raise
        complain(str(error) or type(error).__name__)
        return UNREACHABLE if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) else REFUSED


def _usage(bad: click.ClickException) -> str:
    """A usage error in one line, with the nearest option and where to read more."""
    context = getattr(bad, "ctx", None)
    where = context.command_path if context is not None else "timeline"
    if isinstance(bad, click.NoSuchOption) and context is not None:
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        hint = INSTEAD.get((where, bad.option_name), "") or nearest(bad.option_name, [*known, "--help"])
        if not hint and isinstance(context.command, click.Group):
            hint = f" A command's options stand after it: '{where} COMMAND … {bad.option_name}'."
        said = f"there is no option {bad.option_name}.{hint}"
    else:
        said = bad.format_message()
    said = " ".join(said.split())
    if "unexpected extra argument" in said:
        said += ": what has spaces in it needs quotes"
    return f"{said}{'' if said.endswith(('.', '?')) else '.'} See '{where} --help'."


def awaited(work: Coroutine[Any, Any, int | None]) -> int:
    """Runs a command's coroutine to its end; its exit code (None: done)."""
    return asyncio.run(work) or DONE
