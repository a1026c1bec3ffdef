"""The `kvstore` command: its subcommands, and how it ends.

Exit status: 0 done; 1 the answer is no (a missing block, wrong bytes, a cluster in trouble); 2 misuse, or the cluster cannot do it now,
with one line that says why; 130 ended by Ctrl-C, SIGTERM or SIGHUP.
"""

import signal
from functools import partial
from types import FrameType
from typing import Final, NoReturn

import click

from kvstore.cli.command_group import ERROR_STATUS, PROGRAM, CommandGroup
from kvstore.cli.exit_signals import ending_signals, ends_in_a_line
from kvstore.protocol.extras import DISTRIBUTION

SECTIONS: Final = {
    "Look": {
        **dict.fromkeys(("status", "health", "nodes", "tiers"), "status"),
        **{name: name for name in ("top", "console", "topology", "namespaces", "weights", "instances", "doctor")},
    },
    "Data": dict.fromkeys(("put", "get", "exists", "locate", "keys", "rm", "pin", "unpin"), "blocks"),
    "Operate": {
        **dict.fromkeys(("drain", "forget"), "drain"),
        "quota": "quota",
        **dict.fromkeys(("audit", "sessions", "slow"), "operations"),
    },
    "Plan": {name: name for name in ("plan", "simulate", "lab", "record", "replay", "bench")},
    "Set up": {name: name for name in ("up", "demo", "token", "certs", "check", "completion")},
}
"""Sections of the help -> command -> its module in this folder."""


@click.group(cls=CommandGroup, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name=DISTRIBUTION)
def kvstore() -> None:
    """A distributed, multi-tier store for the KV cache of large language models.

    Settings come from flags, from KVSTORE_CLIENT_* variables, or from the [client] section of a TOML file (--config, KVSTORE_CONFIG).

    Exit status: 0 done; 1 the answer is no; 2 misuse, or the cluster cannot do it now; 130 interrupted.
    """


def main() -> None:
    """The console script."""
    for number in ending_signals():
        signal.signal(number, _terminate)
    ends_in_a_line(partial(kvstore, prog_name=PROGRAM), ERROR_STATUS)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """As Ctrl-C, so that clusters of one's own are stopped and temporary folders removed."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # it comes twice, of the shell and of the kernel, and would end the clean-up
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
