"""`kvstore doctor`: checks this machine, its transports and the cluster, with advice for each problem.

Exit status 1: a problem keeps a cluster from working.
"""

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


@click.command(short_help="Check this machine and its cluster, with advice.")
@click.option("--nvme", default="", metavar="DIR[:SIZE]", help="Check the disk of DIR for an NVMe tier.  [default: the node's setting]")
@json_option
@client_options
def doctor(nvme: str, as_json: bool, settings: ClientSettings) -> None:
    """Check this machine and the cluster, and print advice for each problem.

    \b
    transports  libraries, devices and limits
    host        disk, ports and certificates of the settings file and variables
    cluster     catalog, etcd, masters, nodes, releases, clocks, shared memory of this host; if a master responds

    Verdicts: ok; warning (works, but slower or with restrictions); missing (a transport cannot be used); wrong (the cluster does not
    work until it is fixed: exit status 1). Without UCX, NIXL and RDMA devices kvstore uses TCP and shared memory.
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
    """Return a table with one row per check."""
    table = new_table("check", "verdict", "found", "what to do", no_wrap=("check", "verdict"))
    for check in checks:
        table.add_row(check.name, Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.found), Text(check.advice))
    return table
