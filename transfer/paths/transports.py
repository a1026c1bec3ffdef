"""Which transports an engine has, and on which rails: ours by name, a user's own by MODULE:CLASS. Libraries are imported when needed."""

import importlib
import importlib.util
import inspect
import ipaddress
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.certificates import Certificates
from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import AUTO, TransferSettings
from kvstore.transfer.memory.exports import Exports
from kvstore.transfer.shm.agent import SharedMemoryAgent
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.connection import Connection, Transport
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection
from kvstore.transfer.streams.tls import TlsTransport
from kvstore.transfer.topology.model import LOOPBACK, RDMA_KINDS, Nic, Topology

NAMES: Final = ("shm", "tcp", "ucx", "nixl")
MAX_PORT: Final = 65_535


class Maker:
    """Makes an engine's agents. They share what peers may reach (`exports`) and who serves them (`target`)."""

    def __init__(
        self,
        name: str,
        settings: TransferSettings,
        exports: Exports,
        target: Target,
        *,
        listens: bool,
        tls: Certificates | None = None,
    ) -> None:
        """`tls`: what goes over TCP is encrypted, and nothing goes unencrypted but what `allow_plaintext_rdma` lets."""
        self._tls = tls
        self._name = name
        self._settings = settings
        self._exports = exports
        self._target = target
        self._listens = listens

    def transports(self, topology: Topology) -> list[str]:
        """The transports to be used, the preferred one first. Raises ConfigError for a name that is none."""
        return chosen_transports(self._settings, topology, is_tls=self._tls is not None)

    def rails(self, transport: str, topology: Topology) -> list[Rail]:
        """The rails of one transport. Raises ConfigError when `rails` of the settings names a NIC that is not there."""
        if transport in ("shm", "nixl"):
            return [Rail()]
        nics = [nic for nic in topology.rails(self._settings.rails) if nic.is_usable]
        port = self._port(transport, topology)
        if transport == "ucx":
            return self._fabric_rails([nic for nic in nics if nic.kind in RDMA_KINDS] or nics, topology, port) or [Rail(port=port)]
        return [_rail(nic, _address(nic), port) for nic in nics if nic.addresses] or [Rail("lo", "127.0.0.1", port=port)]

    def _fabric_rails(self, nics: Sequence[Nic], topology: Topology, port: int) -> list[Rail]:
        """A port without an IP address is introduced by another NIC's, on a TCP port of its own: by the loopback no host would find it."""
        lender = min((_address(nic) for nic in topology.usable() if nic.addresses and nic.kind != LOOPBACK), key=_version, default="")
        borrowers = [nic.name for nic in topology.nics if not nic.addresses]
        return [
            _rail(nic, _address(nic), port) if nic.addresses else _rail(nic, lender, _after(port, 1 + borrowers.index(nic.name)))
            for nic in nics
        ]

    def _port(self, transport: str, topology: Topology) -> int:
        """Where it listens: on one address each transport needs a port of its own. UCX's come last, for it may need several."""
        listening = [name for name in self.transports(topology) if name not in ("shm", "nixl")]
        order = sorted(listening, key=lambda name: (name != "tcp", name == "ucx"))
        return _after(self._settings.listen_port, order.index(transport) if transport in order else 0)

    def make(self, transport: str, rail: Rail) -> TransferAgent:
        """Raises ConfigError: a library is missing, an address is in use, or a class is no plug-in."""
        if transport == "shm":
            return SharedMemoryAgent(self._name, rail, self._settings, exports=self._exports, listens=self._listens)
        if transport == "tcp":
            return self._over(TlsTransport(self._tls), rail) if self._tls is not None else self._over(TcpConnection, rail)
        if transport == "ucx":
            from kvstore.transfer.ucx.connection import UcxConnection

            return self._over(UcxConnection, rail, replace(self._settings, tcp_streams=1))  # two would share its one worker
        if transport == "nixl":
            from kvstore.transfer.nixl.agent import NixlAgent

            return NixlAgent(self._name, rail, self._settings)
        kind = _load(transport)
        if issubclass(kind, Connection):
            return self._over(kind, rail)
        agent: TransferAgent = kind(self._name, rail)
        return agent

    def _over(self, kind: Transport, rail: Rail, settings: TransferSettings | None = None) -> TransferAgent:
        chosen = settings or self._settings
        return ConnectionAgent(self._name, rail, chosen, kind, exports=self._exports, target=self._target, listens=self._listens)


def _rail(nic: Nic, address: str, port: int) -> Rail:
    return Rail(nic.name, address, nic.numa_node, nic.speed_gbit_s, port)


def _address(nic: Nic) -> str:
    """IPv4 first; "" for a NIC without any."""
    return min(nic.addresses, key=_version, default="")


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _after(port: int, count: int) -> int:
    """The port so many after it; 0, for any, stays so. Raises ConfigError when there is none."""
    if port and port + count > MAX_PORT:
        raise ConfigError(f"listen_port leaves no room behind it: this engine needs ports up to {port + count}")
    return port + count if port else 0


def _load(path: str) -> type[Any]:
    """The class at MODULE:CLASS. Raises ConfigError unless it is a Connection or a TransferAgent."""
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module runs it
        raise ConfigError(f"transports names {path!r}, which cannot be imported: {error!r}") from error
    if not isinstance(kind, type) or not issubclass(kind, (Connection, TransferAgent)):
        raise ConfigError(f"transports names {path!r}, which is neither a Connection nor a TransferAgent")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"transports names {path!r}, which lacks {missing}")
    return kind


def first_of_each(agents: Sequence[TransferAgent]) -> dict[str, TransferAgent]:
    """One agent of each transport."""
    found: dict[str, TransferAgent] = {}
    for agent in agents:
        found.setdefault(agent.transport, agent)
    return found


def chosen_transports(settings: TransferSettings, topology: Topology, *, is_tls: bool = False) -> list[str]:
    """What the setting `transports` means on this machine, the preferred one first. Raises ConfigError for a name that is none, and for
    UCX beside NIXL: each brings a UCX of its own, and the two crash in one process.

    With TLS, what is not encrypted and leaves the host is not chosen, and refused where it is named, unless allow_plaintext_rdma is said.
    By itself UCX goes before NIXL, for its peers have to show a region's key.
    """
    if settings.transports == AUTO:
        has_rdma = (settings.allow_plaintext_rdma or not is_tls) and any(nic.kind in RDMA_KINDS for nic in topology.usable())
        fast = [name for name, module in (("ucx", "ucxx"), ("nixl", "nixl")) if has_rdma and importlib.util.find_spec(module)]
        return ["shm", *fast[:1], "tcp"]
    names = list(dict.fromkeys(name.strip() for name in settings.transports.split(",") if name.strip()))
    for name in names:
        if name not in NAMES and ":" not in name:
            raise ConfigError(f"transports names {name!r}: write some of {', '.join(NAMES)}, or MODULE:CLASS for your own, or auto")
    if "ucx" in names and "nixl" in names:
        raise ConfigError("transports names both ucx and nixl, whose libraries crash in one process: choose one")
    plain = [name for name in names if name not in ("shm", "tcp")]
    if is_tls and plain and not settings.allow_plaintext_rdma:
        raise ConfigError(
            f"transports names {', '.join(plain)}, which nothing encrypts, beside TLS: leave it out, or say allow_plaintext_rdma=true"
        )
    if not names:
        raise ConfigError("transports is empty: write auto, or some of " + ", ".join(NAMES))
    return names
