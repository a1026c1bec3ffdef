"""`kvstore doctor`: what of this machine the fast transports and a cluster need, how the cluster fares, and what to do about what is amiss.

Exit status 1: something is wrong that keeps a cluster from working."""

import dataclasses
import datetime
import sys
from collections.abc import Sequence
from typing import Final

import click
from rich.table import Table
from rich.text import Text

from kvstore.cli.options import client_options, config_file, json_option, show
from kvstore.cli.tools import cluster_checks, host_checks
from kvstore.cli.tools.tables import new_table
from kvstore.cli.tools.transport_checks import Check, CheckVerdict, examine
from kvstore.client.config import ClientSettings

_STYLES: Final = {CheckVerdict.OK: "green", CheckVerdict.WARNING: "yellow", CheckVerdict.MISSING: "red", CheckVerdict.WRONG: "bold red"}
WRONG_STATUS: Final = 1


@click.command(short_help="Check this machine and its cluster; say what to do.")
@click.option(
    "--nvme", default="", metavar="DIR[:SIZE]", help="Look at the disk there, as for a node's NVMe tier.  [default: the node's setting]"
)
@json_option
@client_options
def doctor(nvme: str, as_json: bool, settings: ClientSettings) -> None:
    """Check this machine: the libraries and devices of the fast transports and the limits that they run into; disk, ports and
    certificates, as the settings file and variables give them to this host's daemons; and, where a master answers, the cluster: catalog,
    etcd, masters, nodes, releases, clocks, and who shares memory on this host.

    Each line is ok, a warning (it works, but slower or for fewer), missing (a transport is not used for want of it) or wrong (a cluster
    does not work before it is mended: exit status 1), with what to do about it. Without UCX, NIXL and RDMA devices kvstore uses TCP
    and shared memory.
    """
    now = datetime.datetime.now(datetime.UTC)
    host = [
        host_checks.numa(),
        host_checks.gids(),
        host_checks.nvme(nvme or host_checks.setting_of("node", "nvme", config_file())),
        host_checks.ports(),
        host_checks.certificate(settings.tls_cert, now),
        *(host_checks.certificate(file, now, whose) for whose, file in host_checks.certificate_files(config_file()).items()),
    ]
    checks = [*examine(), *host, *cluster_checks.checks(settings), *cluster_checks.shared_memory_checks(settings)]
    found = [{**dataclasses.asdict(check), "verdict": check.verdict.value} for check in checks]
    show(found, lambda: doctor_table(checks), as_json=as_json)
    if not cluster_checks.are_well(checks):
        sys.exit(WRONG_STATUS)


def doctor_table(checks: Sequence[Check]) -> Table:
    """One row a check."""
    table = new_table("check", "verdict", "found", "what to do", no_wrap=("check", "verdict"))
    for check in checks:
        table.add_row(check.name, Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.found), Text(check.advice))
    return table
