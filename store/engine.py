"""A node's transfer engine: made as the node is to be reached."""

import logging
from dataclasses import replace

from kvstore.protocol.errors import Broken
from kvstore.security.binding import is_loopback
from kvstore.security.tls.certificates import Certificates
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.rails import chosen_transports
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.model import LOOPBACK, Topology

log = logging.getLogger("kvstore.store")


def make_engine(transfer: TransferSettings, instance: int, *, listens_on: str, tls: Certificates | None = None) -> TransferEngine | None:
    """The engine of the node's process `instance`, which serves clients of other hosts. None, and a warning, where the system does not
    tell its network interfaces. Raises ConfigError for settings that cannot be met."""
    try:
        topology = Discovery.configured(transfer).look()
    except Broken as error:
        log.warning("no transfer engine: the topology of this host is unknown: %s", error)
        return None
    settings = engine_settings(transfer, topology, listens_on=listens_on, is_tls=tls is not None)
    return TransferEngine(f"node-{instance:x}", settings, topology=topology, tls=tls)


def engine_settings(transfer: TransferSettings, topology: Topology, *, listens_on: str, is_tls: bool = False) -> TransferSettings:
    """A node's engine serves other hosts: clients of this one map its slabs. Where the node is not to be reached from outside, its engine
    is not either."""
    names = [name for name in chosen_transports(transfer, topology, is_tls=is_tls) if name != "shm"]
    loopback = next((nic.name for nic in topology.nics if nic.kind == LOOPBACK), "")
    return replace(transfer, rails=transfer.rails or (loopback if is_loopback(listens_on) else ""), transports=",".join(names) or "tcp")
