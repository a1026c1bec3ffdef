"""A real etcd of three members for tests, on free ports of the loopback; each can be killed and started again."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.etcd_server import EtcdServer
from tests.ports import free_ports

MEMBERS: Final = 3


class EtcdCluster:
    """`start` it, and `remove` it at the end. Its data outlives kills."""

    def __init__(self, folder: Path, *extra_flags: str) -> None:
        peers = {f"m{index}": f"http://127.0.0.1:{port}" for index, port in enumerate(free_ports(MEMBERS))}
        everybody = ",".join(f"{name}={url}" for name, url in peers.items())
        self.members: list[EtcdServer] = []
        for name, url in peers.items():
            (folder / name).mkdir()
            which = (
                f"--name={name}",
                f"--listen-peer-urls={url}",
                f"--initial-advertise-peer-urls={url}",
                f"--initial-cluster={everybody}",
            )
            self.members.append(EtcdServer(folder / name, *which, *extra_flags))

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.host_port for member in self.members)

    def start(self, members: Sequence[EtcdServer] = ()) -> None:
        """Start all, or these, and wait until they answer: none does before a majority runs."""
        chosen = members or self.members
        with ThreadPoolExecutor(len(chosen)) as threads:
            list(threads.map(EtcdServer.start, chosen))

    def remove(self) -> None:
        for member in self.members:
            member.remove()
