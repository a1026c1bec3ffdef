"""The command `audit`: who changed what in the cluster, from which address, and which logins were refused."""

import re
import time
from datetime import UTC, datetime
from typing import Any, Final

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.client.tools.audit_table import audit_table, matching
from kvstore.protocol.audit_lines import REFUSED

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DEFAULT_LINES: Final = 50


class Since(click.ParamType[float]):
    """A time before now (`90s`, `15m`, `2h`, `7d`), or a day or time in UTC (`2026-11-27`, `2026-11-27T12:30`), as Unix time."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if found := re.fullmatch(r"(\d{1,9})([smhd])", value):
            return time.time() - int(found[1]) * UNITS_S[found[2]]
        try:
            told = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time: write 90s, 15m, 2h, 7d, 2026-11-27 or 2026-11-27T12:30 (UTC)", param, ctx)
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


@click.command(short_help="Show who changed what, and refused logins.")
@click.option("--since", type=Since(), help="Since a time: 15m, 2h, 7d ago, or 2026-11-27T12:30 (UTC).  [default: all that is kept]")
@click.option("--by", metavar="NAME", help="Of an operator: the name of its token or certificate, or its address.")
@click.option("--action", metavar="ACTION", help="Of one kind: quota_set, drain, forget, login, ... (docs/operations.md).")
@click.option("--refused", is_flag=True, help="Only what was refused: wrong credentials, and requests that they do not allow.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=DEFAULT_LINES, show_default=True, help="The newest so many.")
@json_option
@client_options
def audit(
    since: float | None, by: str | None, action: str | None, refused: bool, lines: int, as_json: bool, settings: ClientSettings
) -> None:
    """Show the audit trail of the cluster, newest last: operator, address, action, old and new value, result.

    The catalog keeps the newest 4,096 changes and 1,024 refused or repeated requests of all masters; each master's log has all of its own
    (event `audit`). With --json one object a line.
    """
    with Control.find(settings) as control:
        entries = control.audit()
    found = matching(entries, since_s=since, by=by, action=action, result=REFUSED if refused else None)[-lines:]
    if as_json:
        for entry in found:
            echo_json(as_dict(entry))
    else:
        console().print(audit_table(found))
