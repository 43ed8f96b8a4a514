"""Commands about the command line itself: `timeline help`, `timeline version`, `timeline completion`."""

from __future__ import annotations

import json
import platform

import click
from click.shell_completion import get_completion_class

from timeline import __version__
from timeline.cli.app import DONE, cli, say
from timeline.cli.options import connection_page, json_option

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_TIMELINE_COMPLETE"


@click.command("help")
@click.argument("words", nargs=-1, metavar="[COMMAND…|connection]")
def help(words: tuple[str, ...]) -> int:
    """Show the help of a command, or of the connection options that all clients take.

    \b
    Example:
      timeline help topic create
      timeline help connection
    """
    if words == ("connection",):
        say(*connection_page().splitlines())
    else:
        cli.main([*words, "--help"], prog_name="timeline", standalone_mode=False)
    return DONE


@click.command()
@json_option
def version(as_json: bool) -> int:
    """Print the version of this package. With --json: of its wire and of Python, too.

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
    return DONE


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print the script that completes commands, options and topics in SHELL. Topics need a broker that answers.

    \b
    Example:
      eval "$(timeline completion bash)"                        # in ~/.bashrc
      eval "$(timeline completion zsh)"                         # in ~/.zshrc
      timeline completion fish > ~/.config/fish/completions/timeline.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "timeline", VARIABLE).source())
    return DONE
