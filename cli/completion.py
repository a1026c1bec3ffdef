"""The command `completion`: prints a shell's completion script."""

from typing import Final

import click
from click.shell_completion import get_completion_class

from kvstore.cli.command_group import PROGRAM
from kvstore.protocol.errors import InvalidArgument

VARIABLE: Final = "_KVSTORE_COMPLETE"
"""Set by the completion script: the program then prints completions and exits."""


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    \b
    bash  source it in ~/.bashrc
    zsh   write it to a file _kvstore in a folder of $fpath
    fish  write it to ~/.config/fish/completions/kvstore.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise InvalidArgument(f"click has no completion for {shell}")
    click.echo(kind(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source())
