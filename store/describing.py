"""This host's topology and the node's engine as the master knows them: told once, and again whenever a link changes, or the engine
describes itself otherwise: with whom its certificate is for, which peers insist on."""

import logging
from typing import Protocol

from kvstore.protocol.errors import Broken
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import dump_topology
from kvstore.transfer.topology.links import LinkChange, LinkWatch
from kvstore.transfer.topology.model import Topology

log = logging.getLogger("kvstore.store")


class Describe(Protocol):
    """Has the masters told what is given. For any thread."""

    def __call__(self, *, topology: bytes, transfer: bytes) -> None: ...


def watch_topology(transfer: TransferSettings, engine: TransferEngine | None, describe: Describe) -> LinkWatch | None:
    """Have `describe` told the topology as it is now, and from the watch's `start` on each change of it, which `engine` hears too, or of
    how `engine` describes itself. The caller closes the watch. None, and a warning, where the system does not tell its network
    interfaces."""
    told = b""

    def changed(topology: Topology, changes: list[LinkChange]) -> None:
        if engine is not None:
            engine.refresh(topology)
        tell(topology)

    def tell(topology: Topology) -> None:
        nonlocal told
        now = engine.describe() if engine is not None else b""
        describe(topology=dump_topology(topology), transfer=now)
        told = now

    def otherwise() -> None:
        if engine is not None and engine.describe() != told:
            tell(watch.topology)

    try:
        look, interval_s = Discovery.configured(transfer).look, transfer.link_poll_interval_s
        watch = LinkWatch(look, changed, poll_interval_s=interval_s, otherwise=otherwise)
    except Broken as error:
        log.warning("the topology of this host is unknown: %s", error)
        return None
    try:
        changed(watch.topology, [])
    except BaseException:
        watch.close()
        raise
    return watch
