"""What a node without a name of its own is called: the same after a restart, and not as any other node of its host.

That is HOST:PORT where the port is set. Where the system chooses it, it is another one each time, and the name is HOST-ID: the id is
drawn at random once and then is the name of a file, which one process holds (flock) for as long as it lives. With an NVMe tier the
file lies in the tier's folder, so that the name stays with the blocks; without, a node takes the first in `run_dir` that nobody holds:
whose name that was has lost all its blocks. The master keeps removals for a name that is away, so names must not be used up.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.store.config import NodeSettings, split_place

ID_BYTES: Final = 4
"""Random bytes of an id: hosts of one name, such as containers, are told apart by it."""
PREFIX: Final = "node-"
SUFFIX: Final = ".name"


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
