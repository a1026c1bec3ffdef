"""Identity of a node: what it reports of itself to masters and clients, its name, and its host's topology.

A node without a name in its settings is called the same after a restart, and as no other node of its host. That is HOST:PORT where the
port is set. Where the system chooses it the name is HOST-ID: the id is drawn at random once and then is the name of a file, which one
process holds (flock) for as long as it lives. With an NVMe tier the file lies in the tier's folder, so that it stays with the blocks;
without, a node takes the first in `run_dir` that no process holds. The master keeps removals for an absent name, so names must last.
"""

import fcntl
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstore.protocol.errors import Broken, ConfigError
from kvstore.store.config import NodeSettings, split_place
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import dump_topology
from kvstore.transfer.topology.links import LinkChange, LinkWatch
from kvstore.transfer.topology.model import Topology

ID_BYTES: Final = 4
"""Random bytes of an id: hosts of one name, such as containers, are told apart by it."""

PREFIX: Final = "node-"

SUFFIX: Final = ".name"

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a node says of itself. `instance` differs in every process; `host_id` is the `rpc.address.socket_id` of `unix`; `http` is "" for
    none."""

    name: str
    version: str
    host_id: str
    unix: str
    tcp: str
    instance: int
    http: str = ""
    accepts_traces: bool = False
    """The Trace messages of its master."""


def new_instance() -> int:
    return secrets.randbits(63) | 1


class NodeName:
    """A node's name, which no other node of this host gets before `close`. Not thread-safe."""

    def __init__(self, settings: NodeSettings, host: str, tcp: str, run_dir: Path) -> None:
        """Of the node on `host` that listens at `tcp`. Raises ConfigError: the folder cannot be written."""
        self._descriptor: int | None = None
        port = tcp.rpartition(":")[2]
        if settings.name:
            self.text = settings.name
        elif settings.listen.rpartition(":")[2] == port:
            self.text = f"{host}:{port}"
        else:
            folder = Path(split_place(settings.nvme, "nvme")[0]) if settings.nvme else run_dir
            try:
                self.text = f"{host}-{self._take_id(folder)}"
            except OSError as error:
                raise ConfigError(f"the node's name cannot be kept in {folder}: {error.strerror}: say with name what it is") from None

    def close(self) -> None:
        """The name may be another's. A second close is a no-op."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_id(self, folder: Path) -> str:
        """The first id of the folder that nobody holds, or a new one."""
        while True:
            ids = sorted(path.name.removeprefix(PREFIX).removesuffix(SUFFIX) for path in folder.glob(f"{PREFIX}*{SUFFIX}"))
            for node_id in [*ids, secrets.token_hex(ID_BYTES)]:
                descriptor = os.open(folder / f"{PREFIX}{node_id}{SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                else:
                    self._descriptor = descriptor
                    return node_id


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
