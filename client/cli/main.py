"""The `kvstore` command: its subcommands, and how it ends.

Exit status: 0 done; 1 the answer is no (a missing block, wrong bytes); 2 misuse, or the cluster cannot do it now, with one line that
says why; 130 ended by Ctrl-C, SIGTERM or SIGHUP.
"""

import signal
from collections.abc import Mapping
from importlib import import_module
from types import FrameType
from typing import Any, Final, NoReturn

import click

from kvstore.client.cli.ending import ending_signals, ends_in_a_line
from kvstore.protocol.errors import Corrupt, KVStoreError
from kvstore.protocol.extras import DISTRIBUTION

CORRUPT_STATUS: Final = 1
ERROR_STATUS: Final = 2
INTERRUPTED_STATUS: Final = 130


COMMANDS: Final = {
    **{name: name for name in ("up", "demo")},
    **dict.fromkeys(("status", "nodes", "tiers"), "status"),
    "topology": "topology",
    "top": "top",
    "console": "console",
    **{name: name for name in ("instances", "doctor", "certs", "drain", "forget", "replay", "record", "lab", "simulate", "plan", "bench")},
    "token": "token",
    "quota": "quota",
    **dict.fromkeys(("put", "get", "exists", "locate", "keys", "rm", "pin", "unpin"), "blocks"),
}
"""Which module of this folder has a command, in the order that a newcomer needs them."""


class Commands(click.Group):
    """A group that turns typed errors into one line and a status, and loads a command's module when the command is asked for: all of
    them take three times as long as the one that is used."""

    def __init__(self, *arguments: Any, modules: Mapping[str, str] = {}, **settings: Any) -> None:
        """`modules` says for names of commands which module of this folder has them; others are added as to any group."""
        super().__init__(*arguments, **settings)
        self._modules = modules

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            click.echo(f"kvstore: error: {error}", err=True)
            ctx.exit(CORRUPT_STATUS if isinstance(error, Corrupt) else ERROR_STATUS)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED_STATUS)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._modules, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"{__package__}.{self._modules[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Commands, modules=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name=DISTRIBUTION)
def kvstore() -> None:
    """A distributed, multi-tier store for the KV cache of large language models.

    Settings come from flags, from KVSTORE_CLIENT_* variables, or from the [client] section of a TOML file (--config, KVSTORE_CONFIG).
    """


def main() -> None:
    """The console script."""
    for number in ending_signals():
        signal.signal(number, _terminate)
    ends_in_a_line(kvstore, ERROR_STATUS)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """As Ctrl-C, so that clusters of one's own are stopped and temporary folders removed."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # it comes twice, of the shell and of the kernel, and would end the clean-up
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
