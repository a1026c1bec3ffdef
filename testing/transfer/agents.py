"""Conformance of transfer agents, as a test class to inherit. Needs the `dev` extra (pytest).

Covers data movement, exactly one end per request, protection of memory, failures of peers, cancellation, notifications and close.

    class TestMyAgent(AgentConformance):
        def make_agent(self, name: str) -> TransferAgent:
            return MyAgent(name, Rail())

It uses nothing but the interface of agent.py; what only one transport does belongs into that transport's own tests.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    ProtocolError,
    Retry,
    StaleHandle,
    Unreachable,
)
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, SOON_S, assert_nothing_is_left, eventually, in_background, within
from kvstore.testing.transfer.peer import (
    MARK,
    AgentPair,
    PeerProcess,
    RegionAllocator,
    ask,
    is_overwritten,
    move,
    notifications,
    outcome,
    overwrite,
    pattern,
    remote_region,
    whole,
)
from kvstore.transfer.agent import Direction, TransferAgent
from kvstore.transfer.memory.pieces import table_of
from kvstore.transfer.memory.region import Piece, Region

MIB: Final = 1 << 20
both_directions = pytest.mark.parametrize("direction", Direction)
MAX_METADATA_BYTES: Final = 64 << 10
LARGE_BYTES: Final = 16 * MIB
"""Size of a transfer that is still in flight when the caller acts; more than the buffers of two sockets hold."""
GARBAGE: Final = [b"", b"\0", b"\xff" * 100, b"garbage", bytes(range(256)) * 256]


class AgentSuite:
    """Base of the suites. A transport's own class implements `make_agent`."""

    checks_keys = True
    """The owner's side checks keys, bounds and whether the region is open. False only if hardware serves peers by
    itself.
    """
    fences_closed_regions = True
    """After a region's `close` at its owner no byte of a peer's is written to it. False only if peers copy into it
    themselves.
    """

    def make_agent(self, name: str) -> TransferAgent:
        """Return an agent with this name. Also called on a new instance of the test class in another process, without
        fixtures.
        """
        raise NotImplementedError

    @pytest.fixture
    def memory(self) -> Iterator[RegionAllocator]:
        with RegionAllocator() as memory:
            yield memory

    @pytest.fixture
    def pair(self, memory: RegionAllocator) -> Iterator[AgentPair]:
        owner, user = self.make_agent("owner"), self.make_agent("user")
        yield AgentPair(owner, user, memory)
        user.close()
        owner.close()

    @pytest.fixture
    def peer(self) -> Iterator[PeerProcess]:
        """An agent in another process, with one region of LARGE_BYTES."""
        with PeerProcess(type(self), region_bytes=LARGE_BYTES) as peer:
            yield peer


class AgentMoves(AgentSuite):
    """Requests of every shape, sequential and concurrent, in both directions."""

    def test_bytes_are_read_and_written(self, pair: AgentPair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        pair.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
        assert ours.memory == theirs.memory == pattern(1, MIB)
        ours.memory[:] = pattern(3, MIB)
        pair.move(Direction.WRITE, Piece(ours, 0, remote, 0, MIB))
        assert ours.memory == theirs.memory == pattern(3, MIB)

    def test_only_the_bytes_asked_for_are_touched(self, pair: AgentPair) -> None:
        theirs, ours, remote = pair.regions(10_000)
        one, two = pattern(1, 10_000), pattern(2, 10_000)
        pair.move(Direction.READ, Piece(ours, 101, remote, 4999, 3001))
        assert ours.memory == two[:101] + one[4999:8000] + two[3102:]
        pair.move(Direction.WRITE, Piece(ours, 50, remote, 1, 7))
        assert theirs.memory == one[:1] + two[50:57] + one[8:]

    @both_directions
    def test_thousands_of_scattered_pieces(self, pair: AgentPair, direction: Direction) -> None:
        size_bytes, count = 4096, 3000
        theirs, ours, remote = pair.regions(size_bytes * count)
        pieces = [Piece(ours, at * size_bytes, remote, at * 7 % (count + 1) * size_bytes, size_bytes) for at in range(count)]
        # 7 and 3001 share no factor, so no two pieces go to one place; the last place is left over, the first is taken once.
        pieces = [piece for piece in pieces if piece.remote_offset < size_bytes * count]
        pair.move(direction, *pieces)
        seed = 1 if direction is Direction.READ else 2
        before = pattern(seed, size_bytes * count)
        for piece in pieces:
            begin = piece.remote_offset if direction is Direction.READ else piece.local_offset
            moved = before[begin : begin + size_bytes]
            assert ours.part(piece.local_offset, size_bytes) == theirs.part(piece.remote_offset, size_bytes) == moved

    @both_directions
    def test_pieces_of_odd_sizes_in_several_regions(self, pair: AgentPair, direction: Direction) -> None:
        sizes = [1, 3, 4095, 4097, 65_537, 2, 1_000_003, 31]
        regions = [pair.regions(size_bytes + 5) for size_bytes in sizes]
        pair.move(direction, *(Piece(ours, 5, remote, 3, ours.size_bytes - 5) for _, ours, remote in regions))
        for theirs, ours, _ in regions:
            size_bytes = ours.size_bytes
            assert ours.memory[5:] == theirs.memory[3:-2]
            if direction is Direction.READ:
                assert (bytes(ours.memory[:5]), bytes(theirs.memory)) == (pattern(2, size_bytes)[:5], pattern(1, size_bytes))
            else:
                assert (bytes(theirs.memory[:3]), bytes(ours.memory)) == (pattern(1, size_bytes)[:3], pattern(2, size_bytes))

    @both_directions
    def test_a_table_of_pieces_is_moved_as_a_list_is(self, pair: AgentPair, direction: Direction) -> None:
        """The engine passes columns (`Runs`) on as a PieceTable."""
        size_bytes, count = 300, 500
        regions = [pair.regions(2 * size_bytes * count) for _ in range(3)]
        pieces = [
            Piece(regions[at % 3][1], at * size_bytes, regions[at % 2][2], 2 * at * size_bytes, at % size_bytes) for at in range(count)
        ]
        move(pair.user, direction, pair.remote, table_of(pieces))
        before = pattern(1 if direction is Direction.READ else 2, 2 * size_bytes * count)
        for at, piece in enumerate(pieces):
            begin = piece.remote_offset if direction is Direction.READ else piece.local_offset
            moved = before[begin : begin + piece.size_bytes]
            assert piece.local.part(piece.local_offset, piece.size_bytes) == moved
            assert regions[at % 2][0].part(piece.remote_offset, piece.size_bytes) == moved

    @both_directions
    def test_one_large_piece(self, pair: AgentPair, direction: Direction) -> None:
        theirs, ours, remote = pair.regions(LARGE_BYTES)
        pair.move(direction, Piece(ours, 0, remote, 0, LARGE_BYTES))
        assert ours.memory == theirs.memory == pattern(1 if direction is Direction.READ else 2, LARGE_BYTES)

    @both_directions
    def test_no_pieces_are_a_success(self, pair: AgentPair, direction: Direction) -> None:
        assert pair.failure(direction) is None

    def test_requests_under_way_at_once_are_each_over_once(self, pair: AgentPair) -> None:
        size_bytes, count = 100_000, 100
        theirs, ours, remote = pair.regions(size_bytes * count)
        pieces = [Piece(ours, at, remote, at, size_bytes) for at in range(0, size_bytes * count, size_bytes)]
        requests = [ask(pair.user, Direction.READ, pair.remote, [piece]) for piece in pieces]
        assert [outcome(request) for request in requests] == [None] * count
        assert ours.memory == theirs.memory
        pair.user.close()
        assert [request.finish_count for request in requests] == [1] * count
        eventually(lambda: ours.users == 0, "the region is released")

    def test_threads_share_an_agent(self, pair: AgentPair) -> None:
        _, ours, remote = pair.regions(4 * MIB)

        def write_and_read_back(part: int) -> bool:
            pieces = [Piece(ours, part * MIB, remote, part * MIB, MIB)]
            view, is_same = ours.part(part * MIB, MIB), True
            for number in range(20):
                view[:] = data = pattern(100 * part + number, MIB)
                pair.move(Direction.WRITE, *pieces)
                view[:] = bytes(MIB)
                pair.move(Direction.READ, *pieces)
                is_same = is_same and view == data
            return is_same

        workers = [in_background(partial(write_and_read_back, part)) for part in range(4)]
        assert [worker.result(PATIENCE_S) for worker in workers] == [True] * 4

    def test_two_agents_serve_each_other_at_once(self, pair: AgentPair) -> None:
        def write_to(mine: TransferAgent, peer: TransferAgent, seed: int) -> Region:
            source, target = pair.memory.allocate(MIB, pattern(seed, MIB)), pair.memory.allocate(MIB)
            remote, pieces = mine.load_remote(peer.metadata()), [Piece(source, 0, remote_region(peer, target), 0, MIB)]
            for _ in range(50):
                move(mine, Direction.WRITE, remote, pieces)
            return target

        other = in_background(lambda: write_to(pair.owner, pair.user, 1))
        assert write_to(pair.user, pair.owner, 2).memory == pattern(2, MIB)
        assert other.result(PATIENCE_S).memory == pattern(1, MIB)

    def test_a_peer_of_another_process(self, pair: AgentPair, peer: PeerProcess) -> None:
        size_bytes = peer.region.size_bytes
        ours, pieces = whole(pair, peer)
        pair.move(Direction.READ, *pieces)
        assert ours.memory == peer.content
        ours.memory[:] = written = pattern(9, size_bytes)
        pair.move(Direction.WRITE, *pieces)
        ours.memory[:] = bytes(size_bytes)
        pair.move(Direction.READ, *pieces)
        assert ours.memory == written


class AgentFences(AgentSuite):
    """Memory that a peer may not access stays unchanged, and the peer gets a typed error."""

    @both_directions
    @pytest.mark.parametrize(("local_offset", "remote_offset"), [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 1 << 40)])
    def test_bytes_outside_a_region_are_refused(self, pair: AgentPair, direction: Direction, local_offset: int, remote_offset: int) -> None:
        theirs, ours, remote = pair.regions(4096)
        assert isinstance(pair.failure(direction, Piece(ours, local_offset, remote, remote_offset, 4096)), InvalidArgument)
        assert (bytes(theirs.memory), bytes(ours.memory)) == (pattern(1, 4096), pattern(2, 4096))
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        assert ours.memory == theirs.memory

    @both_directions
    def test_a_region_said_to_be_larger_than_it_is(self, pair: AgentPair, direction: Direction) -> None:
        self.needs_checks()
        _, ours, remote = pair.regions(4096)
        piece = Piece(ours, 0, remote._replace(size_bytes=MIB), 1, 4096)
        assert isinstance(pair.failure(direction, piece), InvalidArgument)

    @both_directions
    def test_a_wrong_key_is_denied_also_after_the_right_one(self, pair: AgentPair, direction: Direction) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        wrong = Piece(ours, 0, remote._replace(key=remote.key ^ 1), 0, 4096)
        assert isinstance(pair.failure(direction, wrong), Denied)
        assert (bytes(theirs.memory), bytes(ours.memory)) == (pattern(1, 4096), pattern(2, 4096))
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        assert theirs.memory == ours.memory
        assert isinstance(pair.failure(direction, wrong), Denied)

    def test_the_read_key_lets_read_and_not_write(self, pair: AgentPair) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        piece = Piece(ours, 0, remote._replace(key=theirs.read_key), 0, 4096)
        pair.move(Direction.READ, piece)
        assert ours.memory == pattern(1, 4096)
        ours.memory[:] = bytes(4096)
        assert isinstance(pair.failure(Direction.WRITE, piece), Denied)
        assert theirs.memory == pattern(1, 4096)

    @both_directions
    def test_a_region_closed_by_its_owner_is_refused(self, pair: AgentPair, direction: Direction) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        theirs.close()
        assert isinstance(pair.failure(direction, Piece(ours, 0, remote, 0, 4096)), (StaleHandle, Denied))

    def test_no_byte_lands_in_a_region_after_its_close(self, pair: AgentPair) -> None:
        self.needs_checks()
        if not self.fences_closed_regions:
            pytest.skip("this transport's peers copy by themselves")
        theirs, ours, remote = pair.regions(64 * MIB)
        first = theirs.memory[0]
        ours.memory[0] = first ^ 1
        request = ask(pair.user, Direction.WRITE, pair.remote, [Piece(ours, 0, remote, 0, 64 * MIB)])
        eventually(lambda: theirs.memory[0] != first, "the write has begun")
        theirs.close()
        overwrite(theirs)
        assert isinstance(outcome(request), (StaleHandle, Denied, type(None)))
        assert is_overwritten(theirs)

    def needs_checks(self) -> None:
        if not self.checks_keys:
            pytest.skip("this transport's hardware serves peers unasked")


class AgentConformance(AgentMoves, AgentFences):
    """Conformance of any transfer agent."""

    def test_descriptions_are_small(self, pair: AgentPair) -> None:
        assert 0 < len(pair.owner.metadata()) <= MAX_METADATA_BYTES
        _, _, remote = pair.regions(8 * MIB)
        assert len(remote.descriptors[pair.owner.transport]) <= MAX_METADATA_BYTES

    @pytest.mark.parametrize("metadata", GARBAGE, ids=range(len(GARBAGE)))
    def test_garbage_for_metadata_is_refused(self, pair: AgentPair, metadata: bytes) -> None:
        with pytest.raises(ProtocolError):
            pair.user.load_remote(metadata)

    def test_a_peer_that_closed_is_unreachable_and_others_are_served(self, pair: AgentPair) -> None:
        _, ours, remote = pair.regions(MIB)
        pair.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
        pair.owner.close()
        self.becomes_unreachable(pair, Piece(ours, 0, remote, 0, MIB))
        self.serves_others(pair)

    def test_a_killed_peer_is_unreachable_and_others_are_served(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        pair.move(Direction.WRITE, *pieces)
        under_way = ask(pair.user, Direction.READ, pair.remote, pieces)
        peer.kill()
        assert isinstance(outcome(under_way), (Unreachable, DeadlineExceeded, type(None)))
        self.becomes_unreachable(pair, *pieces)
        with within(SHORT_S), suppress(Retry):
            pair.user.notify(pair.remote, b"lost", Deadline(SHORT_S))
        self.serves_others(pair)

    @both_directions
    def test_a_stalled_peer_is_given_up_and_memory_left_alone(self, pair: AgentPair, peer: PeerProcess, direction: Direction) -> None:
        ours, pieces = whole(pair, peer)
        pair.move(Direction.READ, *pieces)
        with peer.stopped():
            with within(SHORT_S):
                assert isinstance(outcome(ask(pair.user, direction, pair.remote, pieces, timeout_s=SHORT_S)), (Retry, type(None)))
            overwrite(ours)
        check = pair.memory.allocate(ours.size_bytes)
        self.succeeds_again(pair, Piece(check, 0, peer.region, 0, check.size_bytes))
        assert is_overwritten(ours)
        assert MARK not in bytes(check.memory)
        self.serves_others(pair)

    def test_a_deadline_that_is_over_is_no_reason_to_wait(self, pair: AgentPair) -> None:
        _, ours, remote = pair.regions(4096)
        request = ask(pair.user, Direction.READ, pair.remote, [Piece(ours, 0, remote, 0, 4096)], timeout_s=0.0)
        with within(0.0):
            assert isinstance(outcome(request), (DeadlineExceeded, type(None)))

    @both_directions
    def test_a_cancelled_request_ends_and_leaves_memory_alone(self, pair: AgentPair, direction: Direction) -> None:
        theirs, ours, remote = pair.regions(LARGE_BYTES)
        requests = [ask(pair.user, direction, pair.remote, [Piece(ours, 0, remote, 0, LARGE_BYTES)]) for _ in range(3)]
        for request in requests:
            pair.user.cancel(request)
            pair.user.cancel(request)
        assert all(isinstance(outcome(request), (Cancelled, type(None))) for request in requests)
        overwrite(ours)
        self.succeeds_again(pair, Piece(pair.memory.allocate(4096), 0, remote, 0, 4096))
        assert is_overwritten(ours)
        assert MARK not in bytes(theirs.memory)
        assert [request.finish_count for request in requests] == [1, 1, 1]

    def test_a_notification_comes_after_the_writes_before_it(self, pair: AgentPair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        for number in range(1, 21):
            ours.memory[:] = bytes([number]) * MIB
            pair.move(Direction.WRITE, Piece(ours, 0, remote, 0, MIB))
            pair.user.notify(pair.remote, bytes([number]), Deadline(PATIENCE_S))
            assert notifications(pair.owner, 1) == [("user", bytes([number]))]
            assert theirs.memory == bytes([number]) * MIB

    def test_notifications_keep_their_order(self, pair: AgentPair) -> None:
        messages = [number.to_bytes(2) for number in range(200)] + [pattern(1, MAX_METADATA_BYTES)]
        for message in messages:
            pair.user.notify(pair.remote, message, Deadline(PATIENCE_S))
        assert notifications(pair.owner, len(messages)) == [("user", message) for message in messages]
        assert pair.owner.notifications() == []

    def test_closing_ends_requests_under_way(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        pair.move(Direction.READ, *pieces)
        with peer.stopped():
            requests = [ask(pair.user, Direction.READ, pair.remote, pieces) for _ in range(3)]
            with within(0.0):
                pair.user.close()
            assert all(isinstance(outcome(request), (Closed, type(None))) for request in requests)
        assert [request.finish_count for request in requests] == [1, 1, 1]

    def test_a_closed_agent_says_so(self, pair: AgentPair) -> None:
        _, ours, remote = pair.regions(4096)
        pair.user.close()
        pair.user.close()
        assert isinstance(pair.failure(Direction.READ, Piece(ours, 0, remote, 0, 4096)), Closed)

    def test_closed_agents_leave_neither_descriptors_nor_threads(self, memory: RegionAllocator) -> None:
        theirs, ours = memory.allocate(MIB), memory.allocate(MIB)

        def open_and_close() -> None:
            pair = AgentPair(self.make_agent("owner"), self.make_agent("user"), memory)
            pair.move(Direction.WRITE, Piece(ours, 0, remote_region(pair.owner, theirs), 0, MIB))
            pair.user.notify(pair.remote, b"bye", Deadline(PATIENCE_S))
            pair.user.close()
            pair.owner.close()

        open_and_close()  # what a library makes once, at its first use, is not a leak
        assert_nothing_is_left(open_and_close)

    def becomes_unreachable(self, pair: AgentPair, *pieces: Piece) -> None:
        """Each request ends within its deadline, and requests soon fail; an agent may need one to notice."""
        error = None
        with within(PATIENCE_S):
            while error is None:
                with within(1.0):
                    error = outcome(ask(pair.user, Direction.READ, pair.remote, pieces, timeout_s=1.0))
        assert isinstance(error, (Unreachable, DeadlineExceeded))

    def serves_others(self, pair: AgentPair) -> None:
        other = self.make_agent("other")
        try:
            others = AgentPair(other, pair.user, pair.memory)
            theirs, ours, remote = others.regions(MIB)
            others.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
            assert ours.memory == theirs.memory
        finally:
            other.close()

    def succeeds_again(self, pair: AgentPair, *pieces: Piece) -> None:
        """A peer that is back is reached eventually: a new connection may be needed."""

        def succeeds() -> bool:
            return outcome(ask(pair.user, Direction.READ, pair.remote, pieces, timeout_s=SOON_S)) is None

        eventually(succeeds, "the peer is reached again")
