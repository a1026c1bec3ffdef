"""`kvstore doctor`: what of this machine the fast transports need, and what to do about what is not there."""

import dataclasses
from collections.abc import Sequence
from typing import Final

import click
from rich.table import Table
from rich.text import Text

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.tools import sharing
from kvstore.client.tools.doctor import Check, Verdict, examine

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}


@click.command(short_help="Check what this machine offers to the fast transports.")
@json_option
@client_options
def doctor(as_json: bool, settings: ClientSettings) -> None:
    """Check this machine: the libraries and devices of the fast transports, the limits that they run into, and whether this user shares
    memory with the nodes of this host, where a master answers that tells of them.

    Each line is ok, a warning (it works, but slower or for fewer) or missing (a transport is not used for want of it). Without UCX,
    NIXL and RDMA devices kvstore uses TCP and shared memory.
    """
    checks = [*examine(), *sharing.checks(settings)]
    if as_json:
        echo_json([{**dataclasses.asdict(check), "verdict": check.verdict.value} for check in checks])
    else:
        console().print(doctor_table(checks))


def doctor_table(checks: Sequence[Check]) -> Table:
    """One row a check."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("check", "verdict", "found", "what to do"):
        table.add_column(name, overflow="fold", no_wrap=name in ("check", "verdict"))
    for check in checks:
        table.add_row(check.name, Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.found), Text(check.advice))
    return table
