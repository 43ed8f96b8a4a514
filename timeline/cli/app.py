"""The root of the command line: it finds commands, explains mistakes, and turns errors into exit codes."""

from __future__ import annotations

import asyncio
import difflib
import errno
import io
import logging
import os
import re
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from timeline import __version__
from timeline.errors import Closed, Invalid, TimelineError, Unavailable, Unknown, explain
from timeline.wording import folded, install_command, printable

DONE, SOME_FAILED, USAGE, UNREACHABLE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = {
    DONE: ("done", ""),
    SOME_FAILED: (
        "some failed",
        "messages or deliveries; a check of `doctor`, `check-store`, `bench` or `demo`; or one of several brokers did "
        "not answer",
    ),
    USAGE: ("usage", "an option, an argument or a setting is wrong; the error says what is right"),
    UNREACHABLE: ("unreachable", "no broker, store or database answered"),
    REFUSED: ("refused", "by a broker, a store, the system, or by you when you were asked"),
    INTERRUPTED: ("interrupted", "by Ctrl-C, or by SIGTERM before the work was done"),
}
"""All exit codes: in a word, and what they mean. The reference of commands is written from this table."""
_UNANSWERED_CODES = (Unavailable.code, Unknown.code, Closed.code)
"""Codes of errors that mean: no broker, store or database answered."""

GROUPS = {
    "Messages": {
        "produce": ("messages.produce", "Put messages on a timeline"),
        "consume": ("messages.consume", "Take messages when they come due"),
        "move": ("messages.change", "Move messages to another time"),
        "cancel": ("messages.change", "Take messages off the timeline"),
        "show": ("messages.read", "Show one message with all that is known of it"),
        "ls": ("messages.read", "List a topic's messages"),
        "dead": ("messages.dead", "List, revive and purge dead letters"),
    },
    "Topics": {"topic": ("topic", "Create, change and list topics")},
    "Schedules": {
        "schedule": ("schedules.schedule", "Produce messages again and again: cron, periods, RFC 5545"),
    },
    "Run": {
        "serve": ("run.serve", "Run a broker"),
        "gateway": ("run.gateway", "Run a gateway: HTTP in front of brokers"),
        "push": ("run.push", "Try the webhooks of a topic"),
        "token": ("run.token", "Create, list and revoke tokens: who may do what"),
    },
    "Look": {
        "top": ("look.top", "Watch brokers live: load, consumers, lateness"),
        "cluster": ("look.cluster", "Show all brokers: load, clocks, who dispatches what"),
        "forecast": ("look.forecast", "Draw how much comes due, and when"),
        "late": ("look.late", "List late deliveries with their causes"),
        "why": ("look.late", "Explain why one message was late, or is not delivered yet"),
        "doctor": ("look.doctor", "Check that everything works, and say how to fix what does not"),
    },
    "Data": {
        "outbox": ("data.outbox", "Send what a transaction added, once it has committed"),
        "copy": ("data.store", "Copy topics from one store into another"),
        "store": ("data.store", "Bring a store's schema to this version"),
        "pipeline": ("data.pipeline", "Load, back up, forecast and audit by the million, on Spark"),
    },
    "Tools": {
        "check-store": ("check_store", "Prove a store against the storage contract"),
        "bench": ("bench", "Measure speed and lateness on this machine"),
        "demo": ("run.demo", "Watch a real day of departures go out on time"),
        "completion": ("about", "Print the completion script for bash, zsh or fish"),
        "version": ("about", "Print the version of this package"),
        "help": ("about", "Show the help of a command, or of the connection options"),
    },
}
"""Group → command name → (module under `timeline.cli`, one line). A module is imported when its command is used."""
EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)")
"""How click refuses arguments that a command has not."""
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

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
"""Options that people expect of a command which has none like it: what to do instead."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` Did you mean …?` for the nearest of `known`, or nothing. Leading hyphens do not count."""
    bare = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.65)
    return f" Did you mean {bare[near[0]]}?" if near else ""


class Failed(Exception):
    """End a command with `code` and print `reason`. An empty reason prints nothing."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Suggesting(click.Group):
    """A group that names the nearest command when one is mistyped."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as bad:
            # Click does not name the command whose option lacks its value, or has one too many.
            name = context.invoked_subcommand
            command = None if bad.ctx is not None or name is None else self.get_command(context, name)
            if command is not None:
                bad.ctx = click.Context(command, parent=context, info_name=name)
            raise

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # While a shell completes a line (`resilient_parsing`), nothing may be printed into it.
        if not (context.resilient_parsing or name.startswith("-") or self.get_command(context, name)):
            known = self.list_commands(context)
            # A slip of the hand changes a name's length a little: "publish" is not meant to be "push".
            similar = [each for each in known if abs(len(each.lstrip("-")) - len(name)) <= 2]
            hint = nearest(name, similar) or f" There are: {', '.join(known)}."
            raise click.UsageError(f"there is no command {name!r}.{hint}", context)
        return super().resolve_command(context, args)


class Root(Suggesting):
    """The commands of `COMMANDS`. Each is imported when it is used: a client command needs no broker package."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found = getattr(import_module(f"timeline.cli.{COMMANDS[name][0]}"), name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(context, incomplete)
        return [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        codes = ", ".join(f"{code} {word}" for code, (word, _) in EXIT_CODES.items())
        for line in (f"Exit codes: {codes}.", "How to reach a broker: 'timeline help connection'."):
            formatter.write_paragraph()
            formatter.write_text(line)


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


def _print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        say(f"timeline {__version__}")
        context.exit()


@click.group(cls=Root, context_settings=SETTINGS)
@click.option("--debug", is_flag=True, help="Show where an error came from.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Timeline: put a message on a timeline. At its time, never before, it is pushed to one consumer.

    \b
    Example:
      timeline serve &
      timeline topic create departures
      timeline produce departures "gate closes" --in 10s --id UA1545
      timeline consume departures --count 1
    """
    context.ensure_object(dict)["debug"] = debug


def exit_code_of(error: TimelineError | OSError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, Invalid):
        return USAGE
    if isinstance(error, TimelineError):
        return UNREACHABLE if error.code in _UNANSWERED_CODES else REFUSED
    return UNREACHABLE if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) else REFUSED


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Within it, a missing package becomes Failed, with the extra that `what` needs."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("timeline"):
            raise
        said = f"{what} {missing.name}, which is not installed: {install_command(extra)}"
        raise Failed(REFUSED, said) from missing


def debugs() -> bool:
    """Return whether the running command was asked for tracebacks."""
    context = click.get_current_context(silent=True)
    return context is not None and bool((context.find_root().obj or {}).get("debug"))


def say(*lines: str, err: bool = False, indent: int = 0) -> None:
    """Print each of `lines` on one line, printable, on standard output, or on standard error with `err`. With `indent`
    they are sentences: a terminal gets them folded between words, further lines indented."""
    # The file is named, since click takes an output in ASCII for one in UTF-8.
    file = sys.stderr if err else sys.stdout
    width = os.get_terminal_size(file.fileno()).columns if indent and file and file.isatty() else 0
    shown = map(printable, lines)
    click.echo("\n".join(folded(line, width, indent) if width else line for line in shown), file=file)


def complain(text: str) -> None:
    """Print a sentence on standard error, on one line unless that is a narrow terminal."""
    say(f"timeline: {text}", err=True, indent=4)


class Unwritten(OSError):
    """Raised when standard output cannot be written. A plain OSError may as well be of a file that the command works
    on."""


class _OutputFile(io.FileIO):
    """Standard output whose failures are `Unwritten`. A reader who has gone (`| head`) stays a BrokenPipeError."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Unwritten(error.errno, error.strerror) from error
        if written is None:  # a full pipe that does not block
            raise Unwritten(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


@contextmanager
def watched_output() -> Iterator[None]:
    """Within it, standard output raises `Unwritten` when it cannot be written. It is flushed at the end."""
    plain = sys.stdout
    if type(plain) is not io.TextIOWrapper or not isinstance(getattr(plain.buffer, "raw", plain.buffer), io.FileIO):
        yield  # not the process's own output: somebody replaced it
        return
    plain.flush()
    sys.stdout = watched = io.TextIOWrapper(
        io.BufferedWriter(_OutputFile(plain.fileno(), "w", closefd=False)),
        plain.encoding,
        plain.errors,
        line_buffering=plain.line_buffering or plain.write_through,
    )
    try:
        yield
        watched.flush()
    except Unwritten:
        # Drop what is left. Python would try to write it once more at its end, and print an error of its own.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, watched.fileno())
        os.close(null)
        raise
    finally:
        if sys.stdout is watched:  # else click has put one there that ignores a broken pipe
            sys.stdout = plain


class _Printable(logging.Formatter):
    """The format of what the driver logs, in a process that has set up no logging."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join(map(printable, [record.getMessage(), *trace]))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Default for `arguments`: the process's."""
    listed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in listed
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    try:
        with watched_output():
            return _run(listed, debug)
    except Unwritten as error:
        if debug:
            raise
        # Not "refused": a script would repeat what may have been done.
        complain(
            f"standard output cannot be written: {error.strerror}. What was asked for may have been done all "
            "the same: look before you repeat it"
        )
        return SOME_FAILED


def _run(listed: list[str], debug: bool) -> int:
    """Run a command, print its error if there is one, and return the exit code. Raises Unwritten."""
    found: dict[str, bool] = {}  # filled once the command's modules are imported, which takes most of the start
    try:
        # When nobody reads the output any more (`timeline ls t | head`), click ends the process quietly, with 1.
        code = cli.main(listed, prog_name="timeline", standalone_mode=False, obj=found)
        if code == INTERRUPTED:
            complain(EXIT_CODES[INTERRUPTED][0])
        return code if isinstance(code, int) else DONE
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message())
        return USAGE
    except Failed as failed:
        if debug and failed.__cause__ is not None:
            raise failed.__cause__ from None
        if str(failed):
            complain(str(failed))
        return failed.code
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        # asyncio would log what was cut off as an error.
        logging.getLogger("asyncio").disabled = True
        complain(EXIT_CODES[INTERRUPTED][0] + ("" if found else " before it began: nothing was done"))
        return INTERRUPTED
    except click.ClickException as bad:
        complain(_explain_usage(bad))
        return USAGE
    except (TimelineError, OSError) as error:
        if debug or isinstance(error, Unwritten):
            raise
        complain(explain(error) if isinstance(error, TimelineError) else _explain_system(error))
        return exit_code_of(error)


def _explain_system(error: OSError) -> str:
    """Return what the system refused, and for which file."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename else said


def _explain_usage(bad: click.ClickException) -> str:
    """Return a usage error in one line, with the nearest option and where to read more."""
    context = getattr(bad, "ctx", None)
    where = context.command_path if context is not None else "timeline"
    if isinstance(bad, click.NoSuchOption) and context is not None:
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        hint = INSTEAD.get((where, bad.option_name), "") or nearest(bad.option_name, [*known, "--help"])
        if not hint and isinstance(context.command, click.Group):
            hint = f" A command's options stand after it: '{where} COMMAND … {bad.option_name}'."
        said = f"there is no option {bad.option_name}.{hint}"
    else:
        said = " ".join(bad.format_message().split())
        extra = EXTRA.fullmatch(said)
        if extra is not None:  # click has no type for it
            words = extra[1].split()
            more = f" and {len(words) - 3} more" if len(words) > 3 else ""
            said = f"unexpected extra arguments: {' '.join(words[:3])}{more}. Put quotes around values with spaces or *"
    return f"{said}{'' if said.endswith(('.', '?')) else '.'} See '{where} --help'."


def awaited(work: Coroutine[Any, Any, int | None]) -> int:
    """Run a command's coroutine and return its exit code. None means done."""
    return asyncio.run(work) or DONE
