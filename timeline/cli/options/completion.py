"""`timeline completion`: what a shell needs to complete commands, options and topics."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from timeline.cli.app import cli

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_TIMELINE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print the script that makes SHELL complete commands, options and, where a broker answers, topics.

    \b
    Example:
      eval "$(timeline completion bash)"                        # in ~/.bashrc
      eval "$(timeline completion zsh)"                         # in ~/.zshrc
      timeline completion fish > ~/.config/fish/completions/timeline.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "timeline", VARIABLE).source())
    return 0
