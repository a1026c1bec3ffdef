"""The scene of the conformance suite of agents: two agents, requests that are counted, memory that is marked."""

from contextlib import suppress
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction, Remote, Request, TransferAgent
from kvstore.transfer.memory.pieces import Pieces
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion
from kvstore.transfer.testing.peer import PeerProcess, RegionAllocator, pattern, remote_region
from kvstore.transfer.testing.waiting import PATIENCE_S, eventually

MARK: Final = b"\xee" * 4096
"""Written over memory that no transfer may touch any more; long enough that no pattern has it."""


class Pair:
    """The usual scene: `owner`, whose regions are read and written, and `user`, which does it and knows the owner as `remote`."""

    def __init__(self, owner: TransferAgent, user: TransferAgent, memory: RegionAllocator) -> None:
        self.owner, self.user, self.memory = owner, user, memory
        self.remote = user.load_remote(owner.metadata())

    def regions(self, size_bytes: int) -> tuple[Region, Region, RemoteRegion]:
        """(the owner's, with pattern 1; the user's, with pattern 2; the owner's as the user knows it)."""
        theirs, ours = (self.memory.allocate(size_bytes, pattern(seed, size_bytes)) for seed in (1, 2))
        return theirs, ours, remote_region(self.owner, theirs)

    def move(self, direction: Direction, *pieces: Piece) -> None:
        """Submit and wait. Raises what the request failed with."""
        ask(self.user, direction, self.remote, pieces).wait(Deadline(PATIENCE_S))

    def failure(self, direction: Direction, *pieces: Piece) -> KVStoreError | None:
        """What the request fails with; None when it succeeds."""
        return outcome(ask(self.user, direction, self.remote, pieces))


class CountedRequest(Request):
    """Counts how often its agent says that it is over."""

    finish_count = 0

    def finish(self, error: KVStoreError | None = None) -> None:
        self.finish_count += 1
        super().finish(error)


def ask(agent: TransferAgent, direction: Direction, remote: Remote, pieces: Pieces, *, timeout_s: float = PATIENCE_S) -> CountedRequest:
    """Submit as the engine does: the regions are held until the request is over."""

    def release(request: Request) -> None:
        for piece in request.pieces:
            piece.local.release()

    for piece in pieces:
        piece.local.hold()
    request = CountedRequest(direction, remote, pieces, Deadline(timeout_s), callback=release)
    agent.submit(request)
    return request


def outcome(request: Request) -> KVStoreError | None:
    """Wait until it is over: what it failed with, or None."""
    with suppress(KVStoreError):
        request.wait(Deadline(PATIENCE_S))
    assert request.is_over, "the request never ended"
    return request.error


def whole(pair: Pair, peer: PeerProcess) -> tuple[Region, list[Piece]]:
    """The pair's owner is the peer from now on: a region of the user's, and the piece that is all of the peer's."""
    pair.remote = pair.user.load_remote(peer.metadata)
    ours = pair.memory.allocate(peer.region.size_bytes)
    return ours, [Piece(ours, 0, peer.region, 0, peer.region.size_bytes)]


def overwrite(region: Region) -> None:
    region.memory[:] = MARK * (region.size_bytes // len(MARK))


def is_overwritten(region: Region) -> bool:
    return region.memory == MARK * (region.size_bytes // len(MARK))


def notifications(agent: TransferAgent, count: int) -> list[tuple[str, bytes]]:
    """What comes until there are `count`."""
    found: list[tuple[str, bytes]] = []

    def is_enough() -> bool:
        found.extend(agent.notifications())
        return len(found) >= count

    eventually(is_enough, f"{count} notifications")
    return found
