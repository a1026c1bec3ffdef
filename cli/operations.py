"""The commands `audit` (changes and refused requests), `sessions` (connections to the masters) and `slow` (slowest requests)."""

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.text import Text

from kvstore.cli.options import client_options, json_option, show_each
from kvstore.cli.tools.tables import duration, new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import DONE, REFUSED
from kvstore.protocol.errors import InvalidArgument

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
AUDIT_LINES: Final = 50

COLUMNS = ("time (UTC)", "who", "from", "via", "action", "target", "old", "new", "result")

SLOW_LINES = 20


class Since(click.ParamType[float]):
    """A time before now (`90s`, `15m`, `2h`, `7d`), or a day or time in UTC (`2026-11-27`, `2026-11-27T12:30`), as Unix time."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if found := re.fullmatch(r"(\d{1,9})([smhd])", value):
            return time.time() - int(found[1]) * UNITS_S[found[2]]
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time: write 90s, 15m, 2h, 7d, 2026-11-27 or 2026-11-27T12:30 (UTC)", param, ctx)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


@click.command(short_help="Show the audit trail: changes and refused logins.")
@click.option("--since", type=Since(), help="Only later entries: 15m, 2h, 7d ago, or 2026-11-27T12:30 (UTC).  [default: all kept]")
@click.option("--by", metavar="NAME", help="Only of this operator: name of its token or certificate, or its address.")
@click.option("--action", metavar="ACTION", help="Only of one kind: quota_set, drain, forget, login, ... (docs/operations.md).")
@click.option("--refused", is_flag=True, help="Only refused requests: wrong credentials or missing permission.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=AUDIT_LINES, show_default=True, help="Number of newest entries.")
@json_option
@client_options
def audit(
    since: float | None, by: str | None, action: str | None, refused: bool, lines: int, as_json: bool, settings: ClientSettings
) -> None:
    """Show the audit trail of the cluster, newest last: operator, address, action, old and new value, result.

    The catalog keeps the newest 4,096 changes and 1,024 refused or repeated requests of all masters; each master's log has all of its own
    (event `audit`). --json prints one object per line.
    """
    with Control.find(settings) as control:
        entries = control.audit()
    found = matching(entries, since_s=since, by=by, action=action, result=REFUSED if refused else None)[-lines:]
    show_each(map(as_dict, found), lambda: audit_table(found), as_json=as_json)


def matching(
    entries: Sequence[pb.AuditEntry], *, since_s: float | None, by: str | None, action: str | None, result: str | None
) -> list[pb.AuditEntry]:
    """Return the entries that pass all filters; None disables one. `since_s` is Unix time, `by` an actor, kind, credential or address."""
    return [
        entry
        for entry in entries
        if (since_s is None or entry.time_s >= since_s)
        and (by is None or by in (entry.actor, entry.kind, entry.credential, entry.peer))
        and action in (None, entry.action)
        and result in (None, entry.result)
    ]


def audit_table(entries: Sequence[pb.AuditEntry]) -> RenderableType:
    """Return a table with one row per entry; refused and failed ones are red, with the reason."""
    if not entries:
        return Text("The audit trail has no such entry.")
    table = new_table(*COLUMNS)
    for entry in entries:
        who = " ".join(part for part in (entry.kind, entry.actor) if part)
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.time_s)),
            *(text or "-" for text in (who, entry.peer, entry.via, entry.action, entry.target, entry.old, entry.new)),
            _outcome(entry),
        )
    return table


def _outcome(entry: pb.AuditEntry) -> Text:
    times = f", {entry.count:,} times" if entry.count > 1 else ""
    detail = f": {entry.detail}" if entry.detail else ""
    return Text(f"{entry.result}{times}{detail}", style="" if entry.result == DONE else "red")


@click.command(short_help="Show connections to the masters; close one.")
@click.option("--end", "end", metavar="ID", help="Close the connection with this ID. Its peer may connect again.")
@json_option
@client_options
def sessions(end: str | None, as_json: bool, settings: ClientSettings) -> None:
    """Show the connections of clients and nodes to the masters that own the catalog: tenant, role, address, since when, requests.

    To block a peer remove its token from the tokens file, or add its certificate to tls_revoked: both close its connections to masters
    and nodes. --json prints one object per line.
    """
    with Control.find(settings) as control:
        if end is not None:
            number, _, master = end.partition("@")
            if not number.isascii() or not number.isdigit():
                raise InvalidArgument(f"{end!r} is not a session ID: `kvstore sessions` lists them")
            control.end_session(int(number), master)
            click.echo(f"session {end} is closed")
            return
        found = control.sessions()
    show_each(map(as_dict, found), lambda: sessions_table(found), as_json=as_json)


@click.command(short_help="Show the slowest requests by tenant and kind.")
@click.option("--of-tenant", metavar="TENANT", help="Only of this tenant.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=SLOW_LINES, show_default=True, help="Number of slowest requests.")
@json_option
@client_options
def slow(of_tenant: str | None, lines: int, as_json: bool, settings: ClientSettings) -> None:
    """Show the slowest requests of the last 10 minutes at nodes and masters: the slowest of each minute, by tenant and operation.

    Requests under 1 ms are not kept. --json prints one object per line.
    """
    with Control.find(settings) as control:
        found = [one for one in control.slow_requests() if of_tenant in (None, one.tenant)][:lines]
    show_each(map(as_dict, found), lambda: slow_table(found), as_json=as_json)


def session_ids(sessions: Sequence[pb.SessionStatus]) -> list[str]:
    """IDs for `kvstore sessions --end`: the number, with the master's name if several own a part of the catalog."""
    has_several = len({one.master for one in sessions}) > 1
    return [f"{one.id}@{one.master}" if has_several else str(one.id) for one in sessions]


def sessions_table(sessions: Sequence[pb.SessionStatus]) -> RenderableType:
    if not sessions:
        return Text("No connections.")
    table = new_table("id", "who", "role", "address", "connected", "requests", right=("id", "connected", "requests"))
    for id, one in zip(session_ids(sessions), sessions, strict=True):
        who = " ".join(part for part in (one.kind, one.name) if part)
        table.add_row(id, who, one.role or "-", one.peer or "-", duration(one.age_s), f"{one.requests:,}")
    return table


def slow_table(requests: Sequence[pb.SlowRequest]) -> RenderableType:
    if not requests:
        return Text("No request took 1 ms or more in the last 10 minutes.")
    table = new_table("took", "operation", "tenant", "at", "client", "time (UTC)", right=("took",))
    for one in requests:
        when = time.strftime("%H:%M:%S", time.gmtime(one.time_s))
        took = f"{one.duration_us / 1e3:,.1f} ms"
        table.add_row(took, one.operation.replace("_", " "), one.tenant or "-", one.at, one.peer or "-", when)
    return table
