"""The `kvstore` command: its subcommands, and how it ends.

Exit status: 0 done; 1 the answer is no (a missing block, wrong bytes); 2 misuse, or the cluster cannot do it now, with one line that
says why; 130 ended by Ctrl-C or SIGTERM.
"""

import signal
from types import FrameType
from typing import Any, Final, NoReturn

import click

from kvstore.client.cli import blocks as cli_blocks
from kvstore.client.cli import status as cli_status
from kvstore.client.cli.bench import bench
from kvstore.client.cli.demo import demo
from kvstore.client.cli.doctor import doctor
from kvstore.client.cli.forget import forget
from kvstore.client.cli.instances import instances
from kvstore.client.cli.lab import lab
from kvstore.client.cli.plan import plan
from kvstore.client.cli.record import record
from kvstore.client.cli.replay import replay
from kvstore.client.cli.simulate import simulate
from kvstore.client.cli.topology import topology
from kvstore.client.cli.up import up
from kvstore.protocol.errors import Corrupt, KVStoreError
from kvstore.protocol.extras import DISTRIBUTION

CORRUPT_STATUS: Final = 1
ERROR_STATUS: Final = 2
INTERRUPTED_STATUS: Final = 130


class Commands(click.Group):
    """A group that turns typed errors into one line and a status. In the order that a newcomer needs them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            click.echo(f"kvstore: error: {error}", err=True)
            ctx.exit(CORRUPT_STATUS if isinstance(error, Corrupt) else ERROR_STATUS)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED_STATUS)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name=DISTRIBUTION)
def kvstore() -> None:
    """A distributed, multi-tier store for the KV cache of large language models.

    Settings come from flags, from KVSTORE_CLIENT_* variables, or from the [client] section of a TOML file (--config, KVSTORE_CONFIG).
    """


for command in (up, demo, cli_status.status, cli_status.nodes, cli_status.tiers, topology, cli_status.top, instances, doctor, forget):
    kvstore.add_command(command)
for command in (replay, record, lab, simulate, plan, bench):
    kvstore.add_command(command)
for command in (cli_blocks.put, cli_blocks.get, cli_blocks.exists, cli_blocks.locate, cli_blocks.keys):
    kvstore.add_command(command)
for command in (cli_blocks.rm, cli_blocks.pin, cli_blocks.unpin):
    kvstore.add_command(command)


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGTERM, _terminate)
    kvstore()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """As Ctrl-C, so that clusters of one's own are stopped and temporary folders removed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
