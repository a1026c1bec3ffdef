"""Versions of weights as the command line shows them. Pure: from a WeightsTable to what rich prints."""

from typing import Final

from rich.console import RenderableType
from rich.table import Table

from kvstore.protocol import control_pb2 as pb

SHORT: Final = 48
"""Characters of a base that are shown in a table; JSON has all of it."""
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def weights_table(found: pb.WeightsTable, *, tenants: bool) -> RenderableType:
    """`tenants`: whether they are of more than one tenant."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (*(("tenant",) if tenants else ()), "weights", "adapter", "state", "used", "namespaces", "engines"):
        table.add_column(name, justify="right" if name == "namespaces" else "left")
    for one in found.versions:
        engines = ", ".join(one.users) or "-"
        row = (text(one), shortened(one.adapter) or "-", state(one), age(one.used_age_s), str(one.namespaces), engines)
        table.add_row(*((one.tenant or "-", *row) if tenants else row))
    return table


def text(one: pb.WeightsVersion) -> str:
    """`BASE` or `BASE@VERSION`, its base shortened."""
    return weights_text(one.base, one.version)


def weights_text(base: str, version: str) -> str:
    return f"{shortened(base) or '(no base)'}@{version}" if version else shortened(base) or "(no base)"


def shortened(base: str) -> str:
    return base if len(base) <= SHORT else f"{base[: SHORT - 1]}…"


def state(one: pb.WeightsVersion) -> str:
    """Whether an engine uses it, and whether its blocks are evicted first."""
    return ("in use" if one.is_used else "unused") + (", retired" if one.is_retired else "") + ("" if one.is_durable else ", private")


def age(seconds: float) -> str:
    """Time since something, to two digits or so."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
