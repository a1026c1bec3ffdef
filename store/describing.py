"""This host's topology and the node's engine as the master knows them: told once, and again whenever a link changes."""

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
    """Have `describe` told the topology as it is now, and from the watch's `start` on each change of it, which `engine` hears too. The
    caller closes the watch. None, and a warning, where the system does not tell its network interfaces."""

    def changed(topology: Topology, changes: list[LinkChange]) -> None:
        if engine is not None:
            engine.refresh(topology)
        describe(topology=dump_topology(topology), transfer=engine.describe() if engine is not None else b"")

    try:
        watch = LinkWatch(Discovery.configured(transfer).look, changed, poll_interval_s=transfer.link_poll_interval_s)
    except Broken as error:
        log.warning("the topology of this host is unknown: %s", error)
        return None
    try:
        changed(watch.topology, [])
    except BaseException:
        watch.close()
        raise
    return watch
