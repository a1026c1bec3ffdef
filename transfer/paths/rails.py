"""This side's ways out: an agent for each transport on each rail, as links come and go, and the routes that they make to a peer.

Not thread-safe but for `agents`: the engine makes one change at a time.
"""

import logging
from contextlib import ExitStack

from kvstore.protocol.errors import KVStoreError, Unreachable
from kvstore.rpc.address import network_id
from kvstore.transfer.agent import Rail, TransferAgent
from kvstore.transfer.description import AgentInfo, EngineInfo
from kvstore.transfer.memory.region import Region, on_rail
from kvstore.transfer.paths.choice import Path, PathFacts
from kvstore.transfer.paths.peer import Peer, Route, unload
from kvstore.transfer.paths.transports import Maker, first_of_each
from kvstore.transfer.topology.model import Topology
from kvstore.transfer.topology.routing import reaches

Place = tuple[str, str, str]
"""Where an agent belongs: its transport as the settings name it, its rail's device and address. That a link's speed is another does
not make it another place."""
log = logging.getLogger("kvstore.transfer")


class Rails:
    """See the module. Owns the agents."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._agents: dict[Place, TransferAgent] = {}
        self._preference: dict[str, int] = {}

    @property
    def agents(self) -> list[TransferAgent]:
        """Those of preferred transports first."""
        return list(self._agents.values())

    def open(self, topology: Topology) -> None:
        """Make the agents. Raises ConfigError; those that were made are closed by `close`."""
        for place, rail in self._places(topology).items():
            self._agents[place] = self._maker.make(place[0], rail)
        self._prefer()

    def change(self, topology: Topology) -> tuple[list[TransferAgent], bool]:
        """Have agents for these links; returns those that are no longer used, for the caller to close, and whether there are new ones.

        A new rail that cannot be used is logged, and tried again with the next change. Raises ConfigError (nothing has changed): the
        settings name a rail that is not there.
        """
        wanted = self._places(topology)
        gone = [agent for place, agent in self._agents.items() if place not in wanted]
        fresh = {place: agent for place, rail in wanted.items() if place not in self._agents and (agent := self._try(place, rail))}
        have = self._agents | fresh
        self._agents = {place: have[place] for place in wanted if place in have}
        self._prefer()
        return gone, bool(fresh)

    def export(self, region: Region) -> dict[str, bytes]:
        """What peers' agents have to know of a region of ours: once a transport where all its rails say the same, else once a rail."""
        found: dict[str, dict[str, bytes | None]] = {}
        for agent in self.agents:
            found.setdefault(agent.transport, {})[agent.rail.device] = agent.export(region)
        descriptors: dict[str, bytes] = {}
        for transport, said in found.items():
            alike = len(set(said.values())) == 1
            for rail, descriptor in said.items():
                if descriptor is not None:
                    descriptors[transport if alike else on_rail(transport, rail)] = descriptor
        return descriptors

    def _places(self, topology: Topology) -> dict[Place, Rail]:
        return {
            (transport, rail.device, rail.address): rail
            for transport in self._maker.transports(topology)
            for rail in self._maker.rails(transport, topology)
        }

    def _try(self, place: Place, rail: Rail) -> TransferAgent | None:
        try:
            return self._maker.make(place[0], rail)
        except KVStoreError as error:
            log.warning("rail %s cannot be used by %s: %s", rail.device or "(any)", place[0], error)
            return None

    def _prefer(self) -> None:
        self._preference = {transport: number for number, transport in enumerate(first_of_each(self.agents))}

    def routes(self, info: EngineInfo, peer: Peer | None) -> dict[Path, Route]:
        """Every pair of one of our agents and one of the peer's that can speak to each other; those that `peer` has already as they are,
        unless its secret is another: it is another process then, though its name and ports are the same. Whether shared memory reaches
        the peer its agent alone can say.

        Raises ProtocolError for an agent's metadata that is malformed; nothing stays loaded then.
        """
        same_host = info.host == network_id()
        known = peer.info.agents if peer is not None and peer.info.secret == info.secret else ()
        routes: dict[Path, Route] = {}
        fresh: list[Route] = []
        for agent, entry in self._pairs(info, same_host):
            path = Path(agent.transport, agent.rail.device, entry.rail.device)
            old = peer.routes.get(path) if peer is not None and entry in known else None
            if path in routes:
                continue  # two of the peer's rails have one name
            if old is not None and old.agent is agent:
                routes[path] = old._replace(facts=self._facts(agent, entry))
                continue
            try:
                remote = agent.load_remote(entry.metadata)
                agent.trust(remote, info.secret)
                routes[path] = Route(agent, remote, self._facts(agent, entry))
            except Unreachable:
                continue
            except KVStoreError:
                unload(fresh)
                raise
            fresh.append(routes[path])
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
        """Requests under way end with Closed. A second close is a no-op. What one agent raises comes once all others are closed."""
        with ExitStack() as closing:
            for agent in self.agents:
                closing.callback(agent.close)
