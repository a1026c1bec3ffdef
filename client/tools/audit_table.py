"""Entries of the audit trail, filtered and as a table. Pure."""

import time
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.audit_lines import DONE

COLUMNS = ("time (UTC)", "who", "from", "via", "action", "target", "old", "new", "result")


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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
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
