"""Queue of slices to a peer, its order, and the paths of each slice."""

import random
from collections.abc import Collection

from kvstore.protocol.errors import Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction, Rail
from kvstore.transfer.description import EngineInfo
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion
from kvstore.transfer.paths.path_chooser import Path, PathFacts
from kvstore.transfer.paths.peer import PathRoute, Peer, Slice
from kvstore.transfer.paths.transfers import Priority, Transfer
from tests.transfer.faulty import FaultyAgent, settings

SHM = Path("shm", "", "")
FIRST, SECOND = Path("tcp", "rail0", "rail0"), Path("tcp", "rail1", "rail0")
SECOND_NS = 1_000_000_000
AGENT = FaultyAgent("test_peer", Rail())
AGENT.close()


def route(preference: int = 0) -> PathRoute:
    return PathRoute(AGENT, AGENT.load_remote(b'["faulty", "peer", "rail0"]'), PathFacts(preference))


def peer_with(*paths: Path, near: Collection[str] = (), info: EngineInfo | None = None) -> Peer:
    """Shared memory is preferred."""
    info = info or EngineInfo("peer", "host")
    peer = Peer(info, settings(), random.Random(0), lambda location: near if location == "cpu:0" else ())
    peer.set_routes(info, {path: route(int(path.transport != "shm")) for path in paths})
    return peer


def waiting(peer: Peer, priority: Priority = Priority.FOREGROUND, *reach: str) -> Slice:
    """A slice of a new transfer, to regions reachable by these transports ("tcp" if none are named)."""
    transfer = Transfer(Deadline(30), priority, [], lambda transfer, error: None, lambda transfer: None, None)
    local = Region(memoryview(bytearray(64)))
    regions = [RemoteRegion(number, 64, 0, dict.fromkeys(names.split(","), b"")) for number, names in enumerate(reach or ("tcp",))]
    pieces = [Piece(local, 0, remote, 0, 8) for remote in regions]
    return Slice(transfer, peer, Direction.READ, pieces, 8 * len(pieces))


def drained(peer: Peer) -> list[Slice]:
    found = []
    while (part := peer.head()) is not None:
        found.append(part)
        peer.pop()
    return found


def test_failed_slices_precede_others_of_their_priority() -> None:
    peer = peer_with(FIRST)
    background, foreground = [waiting(peer, Priority.BACKGROUND) for _ in range(3)], [waiting(peer) for _ in range(4)]
    peer.push([*background, *foreground])
    failed = [waiting(peer), waiting(peer), waiting(peer, Priority.BACKGROUND)]
    for part in failed:
        peer.push_first(part)
    peer.push(later := [waiting(peer)])
    assert drained(peer) == [failed[1], failed[0], *foreground, *later, failed[2], *background]


def test_slices_of_failed_transfers_are_dropped() -> None:
    peer = peer_with(FIRST)
    parts = [waiting(peer) for _ in range(3)]
    peer.push(parts)
    parts[0].transfer.error = parts[1].transfer.error = Unreachable("gone")
    assert peer.head() is parts[2]


def test_is_idle_requires_nothing_queued_or_in_flight() -> None:
    peer = peer_with(FIRST)
    peer.used_ns = 10
    assert (peer.is_idle(9), peer.is_idle(10)) == (False, True)
    peer.push([waiting(peer)])
    assert not peer.is_idle(10)
    peer.pop()
    peer.chooser.begun(FIRST, 1, 5)
    assert not peer.is_idle(10)
    peer.chooser.succeeded(FIRST, 1, 5, 6)
    assert peer.is_idle(10)


def test_a_path_must_reach_every_region_of_the_slice() -> None:
    peer = peer_with(SHM, FIRST)
    assert peer.choose(waiting(peer, Priority.FOREGROUND, "shm,tcp"), 0) == SHM
    assert peer.choose(waiting(peer, Priority.FOREGROUND, "shm,tcp", "tcp"), 0) == FIRST
    assert peer.choose(waiting(peer, Priority.FOREGROUND, "shm", "tcp"), 0) is None
    one = waiting(peer, Priority.FOREGROUND, "shm")
    one.pieces = [*one.pieces, *one.pieces]
    assert peer.choose(one, 0) == SHM


def test_fenced_slices_use_only_agents_that_honour_fences() -> None:
    peer, plain = peer_with(SHM, FIRST), FaultyAgent("plain", Rail())
    plain.close()
    plain.honours_fences = False  # type: ignore[misc]
    peer.routes[SHM] = peer.routes[SHM]._replace(agent=plain)
    part = waiting(peer, Priority.FOREGROUND, "shm,tcp")
    assert peer.choose(part, 0) == SHM
    part.fences = (7,)
    assert peer.choose(part, 0) == FIRST


def test_choose_prefers_paths_that_failed_the_slice_less() -> None:
    peer = peer_with(FIRST, SECOND)
    part = waiting(peer)
    for path in (FIRST, SECOND, FIRST, SECOND):
        assert peer.choose(part, 0) == path
        part.tried += (path,)
    assert peer.choose(part, 0) is None


def test_choose_leaves_tries_for_the_fallback_transport() -> None:
    """The preferred one has eight paths and `max_attempts` is 6."""
    rails = [Path("shm", f"rail{number}", "") for number in range(8)]
    peer = peer_with(*rails, FIRST)
    part, tried = waiting(peer, Priority.FOREGROUND, "shm,tcp"), []
    while (path := peer.choose(part, 0)) is not None:
        tried.append(path)
        part.tried += (path,)
    assert [path.transport for path in tried] == ["shm"] * 6 + ["tcp"] * 2


def test_when_all_paths_rest_the_one_that_wakes_first_is_tried() -> None:
    peer = peer_with(FIRST, SECOND)
    for path, now_ns in ((FIRST, SECOND_NS), (SECOND, 0)):
        peer.chooser.begun(path, 8, now_ns)
        peer.chooser.failed(path, 8, now_ns)
    assert peer.choose(waiting(peer), SECOND_NS // 4) == SECOND


def test_rails_near_the_memory_at_both_ends_are_preferred() -> None:
    info = EngineInfo("peer", "host", (), {"cpu:0": (("rail0",), ())})
    assert peer_with(FIRST, SECOND, near=("rail1",)).choose(waiting(peer_with()), 0) == SECOND
    other = Path("tcp", "rail0", "rail1")
    assert peer_with(other, FIRST, info=info).choose(waiting(peer_with()), 0) == FIRST
    peer = peer_with(FIRST, SECOND, near=("rail1",))
    far = waiting(peer)
    far.pieces[0].local.location = "cpu:1"
    assert peer.choose(far, 0) == FIRST, "nothing is known of that place"
    assert peer.choose(waiting(peer), 0) == SECOND


def test_new_routes_leave_those_that_are_gone_or_replaced() -> None:
    peer = peer_with(FIRST, SECOND)
    stays, goes = peer.routes[FIRST], peer.routes[SECOND]
    info = EngineInfo("peer", "host", (), {"cpu:0": (("rail0",), ())})
    assert peer.set_routes(info, {FIRST: stays._replace(facts=PathFacts(1))}) == [goes]
    assert (list(peer.chooser.states), peer.chooser.states[FIRST].facts, peer.info) == ([FIRST], PathFacts(1), info)
    replacement = route()
    assert peer.set_routes(info, {FIRST: replacement}) == [stays._replace(facts=PathFacts(1))]
    assert peer.routes == {FIRST: replacement}
