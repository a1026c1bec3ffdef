"""A peer as the engine sees it: the ways to it, what waits for them, and what went over them. Sans-I/O; the engine's lock guards it."""

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
"""A second one on a new connection gets over a short break where there is no other path; a peer that is gone is still told of soon."""


class PathRoute(NamedTuple):
    """How a path is used: which agent of ours, and what it made of the peer's metadata."""

    agent: TransferAgent
    remote: Remote
    facts: PathFacts


@dataclass(slots=True, eq=False)
class Slice:
    """A part of a transfer that goes one way to one peer, by one path at a time."""

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
    """Of its failed attempts, see Request."""
    error: KVStoreError | None = None
    """Of the last attempt."""


class Peer:
    """Another engine. Made by `TransferEngine.connect`; everything but its names belongs to the engine."""

    def __init__(
        self,
        info: EngineInfo,
        settings: TransferSettings,
        random: random.Random,
        preferred_rails: Callable[[str], Collection[str]],
        *,
        owner: object = None,
    ) -> None:
        """`preferred_rails` names the rails of this side that are preferred for memory at a location; `owner` is the engine that made it,
        and the only one that may use it."""
        self.owner = owner
        self.name = info.name
        self.info = info
        self.routes: dict[Path, PathRoute] = {}
        self.chooser = PathChooser(settings, random)
        self.slice_bytes = settings.slice_bytes_of("")
        """As the transport says that slices go by first."""
        self._settings = settings
        self._preferred_rails = preferred_rails
        self._unpreferred_by_location: dict[tuple[str, str], dict[Path, int]] = {}
        self._queue: list[tuple[int, int, Slice]] = []
        self._serial = itertools.count()
        self.is_connected = True
        self.used_ns = 0
        """When it was connected, or a slice to or from it was begun, last; by the engine's clock."""

    def is_idle(self, since_ns: int) -> bool:
        """Whether nothing was begun after that, and nothing waits or is under way."""
        states = self.chooser.states.values()
        return self.used_ns <= since_ns and self.head() is None and not any(state.in_flight_slices for state in states)

    def set_routes(self, info: EngineInfo, routes: Mapping[Path, PathRoute]) -> list[PathRoute]:
        """These are the ways now; returns those that are no longer used."""
        gone = [route for path, route in self.routes.items() if path not in routes or routes[path].remote is not route.remote]
        self.info = info
        self.routes = dict(routes)
        self._unpreferred_by_location.clear()
        if routes:
            first = min(routes, key=lambda path: routes[path].facts.preference)
            self.slice_bytes = self._settings.slice_bytes_of(first.transport)
        self.chooser.set_paths({path: route.facts for path, route in routes.items()})
        return gone

    def push(self, slices: Iterable[Slice]) -> None:
        """These wait for a path, behind others of their priority."""
        for part in slices:
            heapq.heappush(self._queue, (part.transfer.priority, next(self._serial), part))

    def push_first(self, part: Slice) -> None:
        """This one was under way and failed: before all others of its priority."""
        heapq.heappush(self._queue, (part.transfer.priority, -next(self._serial), part))

    def head(self) -> Slice | None:
        """The next slice, or None. Those of transfers that failed meanwhile are dropped."""
        while self._queue and self._queue[0][2].transfer.error is not None:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def pop(self) -> None:
        heapq.heappop(self._queue)

    def choose(self, part: Slice, now_ns: int) -> Path | None:
        """The path for a slice: the chooser's, else one that rests, for otherwise it would fail without having been tried everywhere.

        None when every path that may take it has failed it TRIES_A_PATH times, or its transport `max_attempts` times; those that
        failed it less often go first.
        """
        regions = remote_regions(part.pieces)
        reaching = [path for path in self.routes if _is_reached(regions, path)]
        if part.fences:  # late bytes of an earlier attempt could land over what another agent writes, or what is written after it
            reaching = [path for path in reaching if self.routes[path].agent.honours_fences]
        if part.tried:  # a transport's many rails must not use up the tries of the one to fall back to
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
        """For memory at these two places: at how many of its ends a path's rail is not among the preferred ones."""
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
        """Nothing goes to it any more; what still waited."""
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
    """These are not used any more; what is under way by them fails."""
    for route in routes:
        route.agent.unload_remote(route.remote)


class PeerRegion(NamedTuple):
    """A peer's region, as a source or destination of transfers."""

    peer: Peer
    remote: RemoteRegion
