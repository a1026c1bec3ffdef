"""Sessions, tokens and slow requests as tables. Pure."""

import time
from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.client.tools.status_tables import duration
from kvstore.protocol import control_pb2 as pb

SOON_S: Final = 14 * 86_400
"""A token that ends within so long is shown in yellow."""


def session_ids(sessions: Sequence[pb.SessionStatus]) -> list[str]:
    """By which `kvstore sessions --end` knows them: the number, and the master's name where several own a part of the catalog."""
    are_several = len({one.master for one in sessions}) > 1
    return [f"{one.id}@{one.master}" if are_several else str(one.id) for one in sessions]


def sessions_table(sessions: Sequence[pb.SessionStatus]) -> RenderableType:
    if not sessions:
        return Text("Nobody is connected.")
    table = _table(("id", "who", "role", "address", "connected", "requests"), right=("id", "connected", "requests"))
    for id, one in zip(session_ids(sessions), sessions, strict=True):
        who = " ".join(part for part in (one.kind, one.name) if part)
        table.add_row(id, who, one.role or "-", one.peer or "-", duration(one.age_s), f"{one.requests:,}")
    return table


def tokens_table(tokens: Sequence[pb.TokenStatus], *, now_s: float) -> RenderableType:
    if not tokens:
        return Text("No tokens: the masters have no tokens file, and let everybody in.")
    table = _table(("kind", "name", "role", "id", "ends"))
    for one in tokens:
        table.add_row(one.kind, one.name or "*", one.role or "-", one.credential, _end(one, now_s))
    return table


def slow_table(requests: Sequence[pb.SlowRequest]) -> RenderableType:
    if not requests:
        return Text("No request took 1 ms or more in the last 10 minutes.")
    table = _table(("took", "operation", "tenant", "at", "asked by", "time (UTC)"), right=("took",))
    for one in requests:
        when = time.strftime("%H:%M:%S", time.gmtime(one.time_s))
        took = f"{one.duration_us / 1e3:,.1f} ms"
        table.add_row(took, one.operation.replace("_", " "), one.tenant or "-", one.at, one.peer or "-", when)
    return table


def _end(token: pb.TokenStatus, now_s: float) -> Text:
    if not token.HasField("expires_s"):
        return Text("never")
    left_s, day = token.expires_s - now_s, time.strftime("%Y-%m-%d %H:%M", time.gmtime(token.expires_s))
    if left_s <= 0:
        return Text(f"{day}: has ended", style="red")
    return Text(f"{day}, in {duration(left_s)}", style="yellow" if left_s < SOON_S else "")


def _table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
