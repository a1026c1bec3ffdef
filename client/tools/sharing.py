"""Which nodes of this host a client here, run by this user, shares memory with: as tried by one."""

from typing import Final

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.client.tools.doctor import Check, Verdict
from kvstore.protocol.errors import KVStoreError

LOOK_S: Final = 2.0
"""For all of it: a node that does not answer is no reason to wait long."""

NEEDS_TENANT: Final = "not looked at: it needs a tenant's token and name (--tenant)"


def look(settings: ClientSettings) -> tuple[dict[str, str], str]:
    """By node why not, "" where memory is shared; and why that could not be found out, "" if it was.

    An operator's token reads no blocks. The masters are not asked with one: they would record a refused request.
    """
    if settings.token and not settings.tenant:
        return {}, NEEDS_TENANT
    try:
        with Client(settings=settings) as client:
            return client.shared_memory(deadline_s=min(LOOK_S, settings.deadline_s)), ""
    except KVStoreError as error:
        return {}, f"not looked at: {error}"


def line(found: dict[str, str], why: str) -> str:
    """For people."""
    told = [f"{node}: no, {reason}" if reason else f"{node}: yes" for node, reason in sorted(found.items())]
    return "; ".join(told) or why or "no node on this host"


def checks(settings: ClientSettings) -> list[Check]:
    """One for each node of this host; one that says so where there is none, or no master that would tell."""
    found, why = look(settings)
    if not found:
        return [Check("shared memory", Verdict.OK, line(found, why))]
    return [
        Check(f"shared memory, {node}", Verdict.WARNING, f"no: {reason}", "docs/sharing.md says how other users and containers are let in")
        if reason
        else Check(f"shared memory, {node}", Verdict.OK, "yes")
        for node, reason in sorted(found.items())
    ]
