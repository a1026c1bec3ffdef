"""A peer of an engine: the routes to it, its queue of slices, and its path statistics. Sans-I/O; guarded by the
engine's lock.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.protocol.errors import KVStoreError
from kvstore.transfer.agent import Direction, Remote, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import EngineInfo
from kvstore.transfer.memory.pieces import Pieces, remote_regions
from kvstore.transfer.memory.region import RemoteRegion
from kvstore.transfer.paths.path_chooser import Path, PathChooser, PathFacts
from kvstore.transfer.paths.transfers import Transfer

MAX_TRIES_PER_PATH: Final = 2
"""A second try on a new connection survives a short interruption where there is no other path; a dead peer is still
reported soon.
"""


class PathRoute(NamedTuple):
    """Use of a path: the local agent, and its object for the peer."""

    agent: TransferAgent
    remote: Remote
    facts: PathFacts


@dataclass(slots=True, eq=False)
class Slice:
    """Part of a transfer: pieces in one direction with one peer, on one path at a time."""

    transfer: Transfer
    peer: "Peer"
    direction: Direction
    pieces: Pieces
    size_bytes: int
    path: Path | None = None
    begun_ns: int = 0
    tried: tuple[Path, ...] = ()
    """Paths on which it failed."""
    fences: tuple[int, ...] = ()
    """Fences of its failed attempts; see AgentRequest."""
    error: KVStoreError | None = None
    """Error of the last attempt."""


class Peer:
    """Another engine. Made by `TransferEngine.connect`; everything but its names is internal to the engine."""

    def __init__(
        self,
        info: EngineInfo,
        settings: TransferSettings,
        random: random.Random,
        preferred_rails: Callable[[str], Collection[str]],
        *,
        owner: object = None,
    ) -> None:
        """`preferred_rails` returns the local rails preferred for memory at a location. `owner` is the engine that made
        it, the only one that may use it.
        """
        self.owner = owner
        self.name = info.name
        self.info = info
        self.routes: dict[Path, PathRoute] = {}
        self.chooser = PathChooser(settings, random)
        self.slice_bytes = settings.slice_bytes_of("")
        """Slice size of the most preferred transport."""
        self._settings = settings
        self._preferred_rails = preferred_rails
        self._unpreferred_by_location: dict[tuple[str, str], dict[Path, int]] = {}
        self._queue: list[tuple[int, int, Slice]] = []
        self._serial = itertools.count()
        self.is_connected = True
        self.used_ns = 0
        """Last time it was connected or a slice was begun, on the engine's clock."""

    def is_idle(self, since_ns: int) -> bool:
        """Return True if nothing was begun after `since_ns`, and nothing is queued or in flight."""
        states = self.chooser.states.values()
        return self.used_ns <= since_ns and self.head() is None and not any(state.in_flight_slices for state in states)

    def set_routes(self, info: EngineInfo, routes: Mapping[Path, PathRoute]) -> list[PathRoute]:
        """Replace the routes; returns those that are no longer used."""
        removed = [route for path, route in self.routes.items() if path not in routes or routes[path].remote is not route.remote]
        self.info = info
        self.routes = dict(routes)
        self._unpreferred_by_location.clear()
        if routes:
            first = min(routes, key=lambda path: routes[path].facts.preference)
            self.slice_bytes = self._settings.slice_bytes_of(first.transport)
        self.chooser.set_paths({path: route.facts for path, route in routes.items()})
        return removed

    def push(self, slices: Iterable[Slice]) -> None:
        """Queue slices behind others of their priority."""
        for part in slices:
            heapq.heappush(self._queue, (part.transfer.priority, next(self._serial), part))

    def push_first(self, part: Slice) -> None:
        """Queue a failed slice before all others of its priority."""
        heapq.heappush(self._queue, (part.transfer.priority, -next(self._serial), part))

    def head(self) -> Slice | None:
        """Return the next slice, or None. Drops slices of failed transfers."""
        while self._queue and self._queue[0][2].transfer.error is not None:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def pop(self) -> None:
        heapq.heappop(self._queue)

    def choose(self, part: Slice, now_ns: int) -> Path | None:
        """Return the path for a slice: the chooser's, else one in cooldown, as the slice would otherwise fail without
        having been tried everywhere.

        None if every path that can carry it failed it MAX_TRIES_PER_PATH times, or its transport `max_attempts` times.
        Paths that failed it less often are preferred.
        """
        regions = remote_regions(part.pieces)
        reaching = [path for path in self.routes if _is_reached(regions, path)]
        if part.fences:  # late bytes of an earlier attempt could overwrite this or a later write
            reaching = [path for path in reaching if self.routes[path].agent.honours_fences]
        if part.tried:  # a transport with many rails must leave tries to the fallback
            attempts = Counter(path.transport for path in part.tried)
            reaching = [path for path in reaching if attempts[path.transport] < self._settings.max_attempts]
        fewest = min(map(part.tried.count, reaching), default=MAX_TRIES_PER_PATH)
        if fewest >= MAX_TRIES_PER_PATH:
            return None
        usable = [path for path in reaching if part.tried.count(path) == fewest]
        excluded = [path for path in self.routes if path not in usable] if len(usable) < len(self.routes) else ()
        states = self.chooser.states
        first = part.pieces[0]
        unpreferred_ends = self._unpreferred_ends(first.local.location, first.remote.location)
        return self.chooser.choose(part.size_bytes, now_ns, excluding=excluded, unpreferred_ends=unpreferred_ends) or min(
            usable, key=lambda path: (states[path].cooldown_until_ns, states[path].in_flight_bytes)
        )

    def _unpreferred_ends(self, local: str, remote: str) -> Mapping[Path, int]:
        """Return, by path, at how many of its ends the rail is not preferred for the memory there."""
        found = self._unpreferred_by_location.get((local, remote))
        if found is None:
            local_preferred, remote_preferred = self._preferred_rails(local), self.info.matrix.get(remote, ((), ()))[0]
            found = {
                path: bool(local_preferred and path.local_rail not in local_preferred)
                + bool(remote_preferred and path.remote_rail not in remote_preferred)
                for path in self.routes
            }
            self._unpreferred_by_location[local, remote] = found
        return found

    def close(self) -> list[Slice]:
        """Disconnect; returns the queued slices."""
        self.is_connected = False
        waiting = [part for _, _, part in self._queue]
        self._queue.clear()
        return waiting


def _is_reached(regions: Iterable[RemoteRegion], path: Path) -> bool:
    for region in regions:
        if path.transport not in region.descriptors and region.descriptor(path.transport, path.remote_rail) is None:
            return False
    return True


def unload(routes: Iterable[PathRoute]) -> None:
    """Unload the peers of unused routes; requests in flight on them fail."""
    for route in routes:
        route.agent.unload_remote(route.remote)


class PeerRegion(NamedTuple):
    """A peer's region, as a source or destination of transfers."""

    peer: Peer
    remote: RemoteRegion
