"""Entry point of the `kvstore` command: its subcommands and exit statuses.

Exit status: 0 success; 1 negative result (a missing block, wrong bytes, an unhealthy cluster); 2 usage error or the cluster cannot serve
the request, with the reason in one line; 130 ended by Ctrl-C, SIGTERM or SIGHUP.
"""

import signal
from functools import partial
from types import FrameType
from typing import Final, NoReturn

import click

from kvstore.cli.command_group import ERROR_STATUS, PROGRAM, CommandGroup
from kvstore.cli.exit_signals import ending_signals, run_with_output_errors
from kvstore.protocol.extras import DISTRIBUTION

SECTIONS: Final = {
    "Inspect": {
        **dict.fromkeys(("status", "health", "nodes", "tiers"), "status"),
        **{name: name for name in ("top", "console", "topology", "namespaces", "weights", "instances", "doctor")},
    },
    "Data": dict.fromkeys(("put", "get", "exists", "locate", "keys", "prefetch", "rm", "pin", "unpin", "retain", "end-session"), "blocks"),
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

    Exit status: 0 success; 1 negative result; 2 usage error, or the cluster cannot serve the request; 130 interrupted.
    """


def main() -> None:
    """Run the `kvstore` console script."""
    for number in ending_signals():
        signal.signal(number, _terminate)
    run_with_output_errors(partial(kvstore, prog_name=PROGRAM), ERROR_STATUS)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, so that local clusters are stopped and temporary folders removed."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # sent twice, by the shell and the kernel: the second would end the clean-up
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
