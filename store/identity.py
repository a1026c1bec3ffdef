"""Identity of a node: name, instance, addresses, and its host's topology.

A node without `name` keeps its name across restarts and shares it with no other node of its host. The master keeps
tombstones by name, so names must last.
- With a fixed port the name is HOST:PORT.
- With port 0 it is HOST-ID. The random id is the name of a file that the process locks (flock): in the NVMe tier's
  folder, so that it stays with the blocks; else the first unlocked one in `run_dir`.
"""

import fcntl
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstore.protocol.errors import Broken, ConfigError
from kvstore.store.config import NodeSettings, split_location
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import dump_topology
from kvstore.transfer.topology.links import LinkChange, LinkWatch
from kvstore.transfer.topology.model import Topology

ID_BYTES: Final = 4
"""Random bytes of an id; distinguishes hosts of one name, such as containers."""

PREFIX: Final = "node-"

SUFFIX: Final = ".name"

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Identity reported to masters and clients. `instance` differs in every process. `host_id` is the
    `rpc.address.socket_id` of `unix`. `http` is "" for none."""

    name: str
    version: str
    host_id: str
    unix: str
    tcp: str
    instance: int
    http: str = ""
    accepts_traces: bool = False
    """The node accepts Trace messages of its master."""


def new_instance() -> int:
    return secrets.randbits(63) | 1


class NodeName:
    """Name of a node, locked on this host until `close`. Not thread-safe."""

    def __init__(self, settings: NodeSettings, host: str, tcp: str, run_dir: Path) -> None:
        """Choose the name of the node on `host` that listens at `tcp`. Raises ConfigError: the folder cannot be
        written."""
        self._descriptor: int | None = None
        port = tcp.rpartition(":")[2]
        if settings.name:
            self.text = settings.name
        elif settings.listen.rpartition(":")[2] == port:
            self.text = f"{host}:{port}"
        else:
            folder = Path(split_location(settings.nvme, "nvme")[0]) if settings.nvme else run_dir
            try:
                self.text = f"{host}-{self._take_id(folder)}"
            except OSError as error:
                raise ConfigError(f"cannot store the node's name in {folder}: {error.strerror}: set name") from None

    def close(self) -> None:
        """Unlock the name. A second close is a no-op."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_id(self, folder: Path) -> str:
        """Lock and return the first unlocked id of the folder, or a new one."""
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
    """Sends topology and transfer description to the masters. Thread-safe."""

    def __call__(self, *, topology: bytes, transfer: bytes) -> None: ...


def watch_topology(transfer: TransferSettings, engine: TransferEngine | None, describe: Describe) -> LinkWatch | None:
    """Report the topology now, and from the watch's `start` on each change of it or of the engine's description, to
    `describe` and `engine`. The caller closes the watch. Returns None, with a warning, if the network interfaces cannot
    be read."""
    sent = b""

    def changed(topology: Topology, changes: list[LinkChange]) -> None:
        if engine is not None:
            engine.refresh(topology)
        report(topology)

    def report(topology: Topology) -> None:
        nonlocal sent
        now = engine.describe() if engine is not None else b""
        describe(topology=dump_topology(topology), transfer=now)
        sent = now

    def on_unchanged() -> None:
        if engine is not None and engine.describe() != sent:
            report(watch.topology)

    try:
        look, interval_s = Discovery.configured(transfer).read_topology, transfer.link_poll_interval_s
        watch = LinkWatch(look, changed, poll_interval_s=interval_s, on_unchanged=on_unchanged)
    except Broken as error:
        log.warning("the topology of this host is unknown: %s", error)
        return None
    try:
        changed(watch.topology, [])
    except BaseException:
        watch.close()
        raise
    return watch
