"""The command `check`: whether daemons would accept a tokens, quotas or settings file.

Exit status 1: a file would be refused."""

import sys
from dataclasses import asdict
from typing import Final

import click

from kvstore.client.cli.options import echo_json, json_option
from kvstore.client.tools.file_checks import KINDS, check_file

WRONG_STATUS: Final = 1


@click.command(short_help="Check a tokens, quotas or settings file.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--kind", type=click.Choice(KINDS), help="What the files are.  [default: by their sections]")
@json_option
def check(files: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Read each FILE as the daemons do, and print what it is, or the entry that is wrong.

    Exit status 1 if a file would be refused. Nothing is asked of a cluster.
    """
    found = [check_file(file, kind) for file in files]
    if as_json:
        echo_json([asdict(one) for one in found])
    else:
        for one in found:
            click.echo(f"{one.file}: {one.kind or 'unknown'}, {one.found}" if one.is_valid else f"{one.file}: refused: {one.found}")
    if not all(one.is_valid for one in found):
        sys.exit(WRONG_STATUS)
