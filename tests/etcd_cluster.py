"""A real etcd of three members for tests, on free ports of the loopback or on hosts of their own; each can be killed and started again."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.etcd_server import EtcdServer
from tests.ports import free_ports

MEMBERS: Final = 3
Place = tuple[str, Sequence[str]]
"""An address, and what a command line begins with to run there."""
LOOPBACK: Final[Place] = ("127.0.0.1", ())


class EtcdCluster:
    """`start` it, and `remove` it at the end. Its data outlives kills."""

    def __init__(self, folder: Path, *extra_flags: str, places: Sequence[Place] = (LOOPBACK,) * MEMBERS, syncs: bool = True) -> None:
        """`folder` exists. A member at each of `places`; `syncs` as EtcdServer's."""
        ports = free_ports(len(places))
        peers = {f"m{index}": f"http://{address}:{port}" for index, ((address, _), port) in enumerate(zip(places, ports, strict=True))}
        everybody = ",".join(f"{name}={url}" for name, url in peers.items())
        self.members: list[EtcdServer] = []
        for (name, url), (address, prefix) in zip(peers.items(), places, strict=True):
            (folder / name).mkdir()
            which = (
                f"--name={name}",
                f"--listen-peer-urls={url}",
                f"--initial-advertise-peer-urls={url}",
                f"--initial-cluster={everybody}",
            )
            self.members.append(EtcdServer(folder / name, *which, *extra_flags, address=address, prefix=prefix, syncs=syncs))

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
