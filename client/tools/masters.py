"""What each master that a client was told of says of itself: the owner of the catalog, and those that follow it."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, hello
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import SERVER_MASTER
from kvstore.rpc.address import parse_address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates

LOOK_S: Final = 2.0
"""For each: one that does not answer is no reason to wait long."""
MAX_AT_ONCE: Final = 16
OWNER: Final = "owner"


@dataclass(frozen=True, slots=True)
class MasterTold:
    """One master, at the address at which it was asked. `behind` is how many blocks fewer than the owners it knows of, 0 for more; `owned`
    how many partitions it owns, and `role` "owner" where it owns any; with `trouble` it has not answered, and the rest is empty."""

    address: str
    role: str = ""
    name: str = ""
    records: int = 0
    behind: int = 0
    catalog_health: str = ""
    http: str = ""
    trouble: str = ""
    owned: int = 0
    partitions: int = 0
    version: str = ""
    took_s: float = 0.0
    """From connecting to the last answer."""


def look(settings: ClientSettings, owner: pb.StatusReply) -> list[MasterTold]:
    """All masters that `settings` name, when the owner has told `owner`; the owner's own first if it is none of them."""
    addresses = list(dict.fromkeys(text.strip() for text in settings.master.split(",")))
    if owner.owner.address and owner.owner.address not in addresses and len(addresses) > 1:
        addresses.insert(0, owner.owner.address)  # one that is cut off knows of no owner
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        return list(threads.map(lambda address: _ask(address, settings, owner), addresses))


def line(told: MasterTold, *, known: str = "ok") -> str:
    """For people. Not `known`, the health of the catalog that is told elsewhere."""
    if told.trouble:
        return f"{told.address}: {told.trouble}"
    behind = f", {told.behind:,} blocks behind" if told.behind else ""
    health = f", {told.catalog_health}" if told.catalog_health not in ("ok", known) else ""
    share = f" of {told.owned} of {told.partitions} partitions" if told.partitions > 1 and told.owned else ""
    return f"{told.address}: {told.role}{share}{behind}{health}"


def _ask(address: str, settings: ClientSettings, owner: pb.StatusReply) -> MasterTold:
    settings = replace(settings, deadline_s=min(LOOK_S, settings.deadline_s))
    began_s = time.monotonic()
    try:
        channel = Channel.open(parse_address(address), hello(settings), Deadline(settings.deadline_s), tls=Certificates.of(settings))
        channel.close()
        welcome = channel.welcome
        if welcome.server != SERVER_MASTER:  # nor has it a control plane: gRPC tells of an empty address in traces of its own
            return MasterTold(address, trouble=f"it is {welcome.name!r}, which is no master")
        partitions, control_address = welcome.partitions, welcome.control
        with Control(control_address, settings, *[control_address] * (partitions - 1)) as control:
            told = [control.status_of(partition) for partition in range(partitions)]
    except KVStoreError as error:
        return MasterTold(address, trouble=str(error))
    status, roles = told[0], [one.role for one in told]
    role = OWNER if OWNER in roles else status.role
    records = sum(one.records for one in told)
    behind = max(0, owner.records - records) if role == "following" else 0
    health = "; ".join(dict.fromkeys(one.catalog_health for one in told if one.catalog_health != "ok")) or status.catalog_health
    took_s = time.monotonic() - began_s
    return MasterTold(
        address, role, status.name, records, behind, health, status.http, "", roles.count(OWNER), partitions, status.version, took_s
    )
