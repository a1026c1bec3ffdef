"""The commands `audit`, `sessions` and `slow`: who changed what, who is connected to the masters, what took long."""

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
            told = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time: write 90s, 15m, 2h, 7d, 2026-11-27 or 2026-11-27T12:30 (UTC)", param, ctx)
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


@click.command(short_help="Show who changed what, and refused logins.")
@click.option("--since", type=Since(), help="Since a time: 15m, 2h, 7d ago, or 2026-11-27T12:30 (UTC).  [default: all that is kept]")
@click.option("--by", metavar="NAME", help="Of an operator: the name of its token or certificate, or its address.")
@click.option("--action", metavar="ACTION", help="Of one kind: quota_set, drain, forget, login, ... (docs/operations.md).")
@click.option("--refused", is_flag=True, help="Only what was refused: wrong credentials, and requests that they do not allow.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=AUDIT_LINES, show_default=True, help="The newest so many.")
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
    show_each(map(as_dict, found), lambda: audit_table(found), as_json=as_json)


def matching(
    entries: Sequence[pb.AuditEntry], *, since_s: float | None, by: str | None, action: str | None, result: str | None
) -> list[pb.AuditEntry]:
    """Entries that pass all filters; None lets all pass. `since_s` is Unix time, `by` the actor's name, kind, credential or address."""
    return [
        entry
        for entry in entries
        if (since_s is None or entry.time_s >= since_s)
        and (by is None or by in (entry.actor, entry.kind, entry.credential, entry.peer))
        and action in (None, entry.action)
        and result in (None, entry.result)
    ]


def audit_table(entries: Sequence[pb.AuditEntry]) -> RenderableType:
    """One row an entry; what was refused or failed is red, with its reason below."""
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


@click.command(short_help="Show who is connected to the masters; end a connection.")
@click.option("--end", "end", metavar="ID", help="Close this connection, an ID of the list. Its peer may connect again.")
@json_option
@client_options
def sessions(end: str | None, as_json: bool, settings: ClientSettings) -> None:
    """Show the connections of clients and nodes to the masters that own the catalog: tenant, role, address, since when, requests.

    To keep a peer out take its token out of the tokens file, or add its certificate to tls_revoked: both end its connections to masters
    and nodes. With --json one object a line.
    """
    with Control.find(settings) as control:
        if end is not None:
            number, _, master = end.partition("@")
            if not number.isascii() or not number.isdigit():
                raise InvalidArgument(f"{end!r} is no session: write its ID as `kvstore sessions` prints it")
            control.end_session(int(number), master)
            click.echo(f"session {end} is closed")
            return
        found = control.sessions()
    show_each(map(as_dict, found), lambda: sessions_table(found), as_json=as_json)


@click.command(short_help="Show the slowest requests by tenant and kind.")
@click.option("--of-tenant", metavar="TENANT", help="Of one tenant.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=SLOW_LINES, show_default=True, help="The slowest so many.")
@json_option
@client_options
def slow(of_tenant: str | None, lines: int, as_json: bool, settings: ClientSettings) -> None:
    """Show the slowest requests of the last 10 minutes at nodes and masters: of each tenant and operation the slowest a minute.

    Requests of less than 1 ms are not kept. With --json one object a line.
    """
    with Control.find(settings) as control:
        found = [one for one in control.slow_requests() if of_tenant in (None, one.tenant)][:lines]
    show_each(map(as_dict, found), lambda: slow_table(found), as_json=as_json)


def session_ids(sessions: Sequence[pb.SessionStatus]) -> list[str]:
    """By which `kvstore sessions --end` knows them: the number, and the master's name where several own a part of the catalog."""
    has_several = len({one.master for one in sessions}) > 1
    return [f"{one.id}@{one.master}" if has_several else str(one.id) for one in sessions]


def sessions_table(sessions: Sequence[pb.SessionStatus]) -> RenderableType:
    if not sessions:
        return Text("Nobody is connected.")
    table = new_table("id", "who", "role", "address", "connected", "requests", right=("id", "connected", "requests"))
    for id, one in zip(session_ids(sessions), sessions, strict=True):
        who = " ".join(part for part in (one.kind, one.name) if part)
        table.add_row(id, who, one.role or "-", one.peer or "-", duration(one.age_s), f"{one.requests:,}")
    return table


def slow_table(requests: Sequence[pb.SlowRequest]) -> RenderableType:
    if not requests:
        return Text("No request took 1 ms or more in the last 10 minutes.")
    table = new_table("took", "operation", "tenant", "at", "asked by", "time (UTC)", right=("took",))
    for one in requests:
        when = time.strftime("%H:%M:%S", time.gmtime(one.time_s))
        took = f"{one.duration_us / 1e3:,.1f} ms"
        table.add_row(took, one.operation.replace("_", " "), one.tenant or "-", one.at, one.peer or "-", when)
    return table
