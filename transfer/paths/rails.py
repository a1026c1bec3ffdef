"""Agents of an engine, one per transport and rail, and the routes that they form to a peer.

Transports are built in, or a user's class by MODULE:CLASS; libraries are imported on demand. Not thread-safe except
`agents`: the engine makes one change at a time.
"""

import importlib
import importlib.util
import inspect
import ipaddress
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from kvstore.protocol.errors import ConfigError, KVStoreError, Unreachable
from kvstore.rpc.address import network_id
from kvstore.security.tls.certificates import Certificates
from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.config import AUTO, TransferSettings
from kvstore.transfer.description import AgentInfo, EngineInfo
from kvstore.transfer.memory.region import Exports, Region, on_rail
from kvstore.transfer.paths.path_chooser import Path, PathFacts
from kvstore.transfer.paths.peer import PathRoute, Peer, unload
from kvstore.transfer.shm.agent import SharedMemoryAgent
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.connection import Connection, Transport
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection, TlsTransport
from kvstore.transfer.topology.model import LOOPBACK, RDMA_KINDS, Nic, Topology

NAMES: Final = ("shm", "tcp", "ucx", "nixl")
MAX_PORT: Final = 65_535
AgentKey = tuple[str, str, str]
"""Identity of an agent: its transport as configured, its rail's device and address. Not the link's speed."""
log = logging.getLogger("kvstore.transfer")


def local_address_towards(address: str) -> str:
    """Return the local address from which this host would reach `address`, or "" if there is no route. Sends no packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:  # also without IPv6
        return ""


def reaches(local: Rail, remote: Rail, locals: Sequence[Rail], *, same_host: bool) -> bool:
    """Return True if the local rail can reach the remote one.

    With IP addresses: if the kernel routes by it, or by none of our rails. Rails without addresses reach every other.
    The loopback reaches only this host.
    """
    if not local.address or not remote.address:
        return True
    if (":" in local.address) != (":" in remote.address):
        return False
    if not same_host and (ipaddress.ip_address(remote.address).is_loopback or ipaddress.ip_address(local.address).is_loopback):
        return False
    if ipaddress.ip_address(remote.address).is_loopback:
        return True
    towards = local_address_towards(remote.address)
    return towards == local.address or towards not in [rail.address for rail in locals]


class AgentFactory:
    """Makes an engine's agents, which share `exports` and the `target` that serves them."""

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
        """With `tls`, TCP is encrypted, and unencrypted transports are refused unless `allow_plaintext_rdma` is set."""
        self._tls = tls
        self._name = name
        self._settings = settings
        self._exports = exports
        self._target = target
        self._listens = listens

    def transports(self, topology: Topology) -> list[str]:
        """Return the transports in order of preference. Raises ConfigError for an unknown name."""
        return chosen_transports(self._settings, topology, is_tls=self._tls is not None)

    def rails(self, transport: str, topology: Topology) -> list[Rail]:
        """Return the rails of a transport. Raises ConfigError if the setting `rails` names a NIC that does not exist."""
        if transport in ("shm", "nixl"):
            return [Rail()]
        nics = [nic for nic in topology.rails(self._settings.rails) if nic.is_usable]
        port = self._port(transport, topology)
        if transport == "ucx":
            return self._fabric_rails([nic for nic in nics if nic.kind in RDMA_KINDS] or nics, topology, port) or [Rail(port=port)]
        return [_rail(nic, _address(nic), port) for nic in nics if nic.addresses] or [Rail("lo", "127.0.0.1", port=port)]

    def _fabric_rails(self, nics: Sequence[Nic], topology: Topology, port: int) -> list[Rail]:
        """Give a port without an IP address the address of another NIC, on a TCP port of its own, for the handshake:
        the loopback is not reachable from other hosts.
        """
        lender = min((_address(nic) for nic in topology.usable() if nic.addresses and nic.kind != LOOPBACK), key=_version, default="")
        borrowers = [nic.name for nic in topology.nics if not nic.addresses]
        return [
            _rail(nic, _address(nic), port) if nic.addresses else _rail(nic, lender, _after(port, 1 + borrowers.index(nic.name)))
            for nic in nics
        ]

    def _port(self, transport: str, topology: Topology) -> int:
        """Return the transport's listening port: transports on one address have different ports. UCX comes last, as it
        may need several.
        """
        listening = [name for name in self.transports(topology) if name not in ("shm", "nixl")]
        order = sorted(listening, key=lambda name: (name != "tcp", name == "ucx"))
        return _after(self._settings.listen_port, order.index(transport) if transport in order else 0)

    def make(self, transport: str, rail: Rail) -> TransferAgent:
        """Make an agent. Raises ConfigError: a library is missing, an address is in use, or a class is no plug-in."""
        if transport == "shm":
            return SharedMemoryAgent(self._name, rail, self._settings, exports=self._exports, listens=self._listens)
        if transport == "tcp":
            return self._over(TlsTransport(self._tls), rail) if self._tls is not None else self._over(TcpConnection, rail)
        if transport == "ucx":
            from kvstore.transfer.ucx.connection import UcxConnection

            return self._over(UcxConnection, rail, replace(self._settings, tcp_streams=1))  # two would share one worker
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
    """Return the NIC's address, IPv4 first, or ""."""
    return min(nic.addresses, key=_version, default="")


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _after(port: int, count: int) -> int:
    """Return the port `count` after `port`; 0 (any) stays 0. Raises ConfigError beyond the last port."""
    if port and port + count > MAX_PORT:
        raise ConfigError(f"listen_port {port} is too high: this engine needs ports up to {port + count}, over the limit of {MAX_PORT}")
    return port + count if port else 0


def _load(path: str) -> type[Any]:
    """Return the class at MODULE:CLASS. Raises ConfigError unless it is a Connection or a TransferAgent."""
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import may raise anything
        raise ConfigError(f"transports names {path!r}, which cannot be imported: {error!r}") from error
    if not isinstance(kind, type) or not issubclass(kind, (Connection, TransferAgent)):
        raise ConfigError(f"transports names {path!r}, which is neither a Connection nor a TransferAgent")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"transports names {path!r}, which lacks {missing}")
    return kind


def chosen_transports(settings: TransferSettings, topology: Topology, *, is_tls: bool = False) -> list[str]:
    """Resolve the setting `transports` on this machine, in order of preference.

    Raises ConfigError for an unknown name, and for UCX with NIXL: each loads its own UCX, and the two crash in one
    process. With TLS, transports that leave the host unencrypted are not chosen, and refused if named, unless
    `allow_plaintext_rdma` is set. `auto` prefers UCX to NIXL, whose peers' keys are not checked.
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
            f"transports names {', '.join(plain)}, which nothing encrypts, beside TLS: leave it out, or set allow_plaintext_rdma=true"
        )
    if not names:
        raise ConfigError("transports is empty: write auto, or some of " + ", ".join(NAMES))
    return names


class RailAgents:
    """Owns the agents of all rails and adapts them to changes of links."""

    def __init__(self, factory: AgentFactory) -> None:
        self._factory = factory
        self._agents: dict[AgentKey, TransferAgent] = {}
        self._preference: dict[str, int] = {}

    @property
    def agents(self) -> list[TransferAgent]:
        """Preferred transports first."""
        return list(self._agents.values())

    def open(self, topology: Topology) -> None:
        """Make the agents. Raises ConfigError; `close` then closes those that were made."""
        for key, rail in self._wanted_rails(topology).items():
            self._agents[key] = self._factory.make(key[0], rail)
        self._rank_transports()

    def change(self, topology: Topology) -> tuple[list[TransferAgent], bool]:
        """Adapt to these links; returns the agents no longer used, for the caller to close, and whether there are new
        ones.

        A new rail that cannot be used is logged and retried at the next change. Raises ConfigError (nothing changed):
        the settings name a rail that does not exist.
        """
        wanted = self._wanted_rails(topology)
        removed = [agent for key, agent in self._agents.items() if key not in wanted]
        added = {key: agent for key, rail in wanted.items() if key not in self._agents and (agent := self._try(key, rail))}
        have = self._agents | added
        self._agents = {key: have[key] for key in wanted if key in have}
        self._rank_transports()
        return removed, bool(added)

    def export(self, region: Region) -> dict[str, bytes]:
        """Return the descriptors of a region: one per transport if all its rails agree, else one per rail."""
        found: dict[str, dict[str, bytes | None]] = {}
        for agent in self.agents:
            found.setdefault(agent.transport, {})[agent.rail.device] = agent.export(region)
        descriptors: dict[str, bytes] = {}
        for transport, exported_by_rail in found.items():
            is_same = len(set(exported_by_rail.values())) == 1
            for rail, descriptor in exported_by_rail.items():
                if descriptor is not None:
                    descriptors[transport if is_same else on_rail(transport, rail)] = descriptor
        return descriptors

    def _wanted_rails(self, topology: Topology) -> dict[AgentKey, Rail]:
        return {
            (transport, rail.device, rail.address): rail
            for transport in self._factory.transports(topology)
            for rail in self._factory.rails(transport, topology)
        }

    def _try(self, key: AgentKey, rail: Rail) -> TransferAgent | None:
        try:
            return self._factory.make(key[0], rail)
        except KVStoreError as error:
            log.warning("rail %s cannot be used by %s: %s", rail.device or "(any)", key[0], error)
            return None

    def _rank_transports(self) -> None:
        self._preference = {name: number for number, name in enumerate(dict.fromkeys(agent.transport for agent in self.agents))}

    def routes(self, info: EngineInfo, peer: Peer | None) -> dict[Path, PathRoute]:
        """Return the routes from our agents to the peer's, reusing those of `peer` that are unchanged.

        Routes of a peer with another secret are not reused: it is another process with the same name and ports. The
        shared-memory agent decides if shared memory reaches the peer. Raises ProtocolError for malformed metadata;
        nothing stays loaded then.
        """
        same_host = info.host == network_id()
        known = peer.info.agents if peer is not None and peer.info.secret == info.secret else ()
        routes: dict[Path, PathRoute] = {}
        added: list[PathRoute] = []
        for agent, entry in self._pairs(info, same_host):
            path = Path(agent.transport, agent.rail.device, entry.rail.device)
            old = peer.routes.get(path) if peer is not None and entry in known else None
            if path in routes:
                continue  # two rails of the peer have the same name
            if old is not None and old.agent is agent:
                routes[path] = old._replace(facts=self._facts(agent, entry))
                continue
            try:
                remote = agent.load_remote(entry.metadata)
                agent.set_secret(remote, info.secret)
                routes[path] = PathRoute(agent, remote, self._facts(agent, entry))
            except Unreachable:
                continue
            except KVStoreError:
                unload(added)
                raise
            added.append(routes[path])
        return routes

    def _pairs(self, info: EngineInfo, same_host: bool) -> list[tuple[TransferAgent, AgentInfo]]:
        found = []
        for agent in self.agents:
            locals = [other.rail for other in self.agents if other.transport == agent.transport]
            common = [entry for entry in info.agents if entry.transport == agent.transport]
            found += [(agent, entry) for entry in common if reaches(agent.rail, entry.rail, locals, same_host=same_host)]
        return found

    def _facts(self, agent: TransferAgent, entry: AgentInfo) -> PathFacts:
        speeds = [speed for speed in (agent.rail.speed_gbit_s, entry.rail.speed_gbit_s) if speed]
        return PathFacts(self._preference[agent.transport], min(speeds, default=0.0) * 1e9 / 8)

    def close(self) -> None:
        """Close all agents; requests in flight fail with Closed. Idempotent. An agent's exception is raised after all
        are closed.
        """
        with ExitStack() as closing:
            for agent in self.agents:
                closing.callback(agent.close)
