"""Conformance of agents: an owner's side lets at its memory only who has the key, within bounds, and while the region is open."""

import pytest

from kvstore.protocol.errors import Denied, InvalidArgument, StaleHandle
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.region import Piece
from kvstore.transfer.testing.peer import pattern
from kvstore.transfer.testing.scene import Pair, ask, is_overwritten, outcome, overwrite
from kvstore.transfer.testing.suite import MIB, AgentSuite, both_directions
from kvstore.transfer.testing.waiting import eventually


class AgentFences(AgentSuite):
    """Memory that a peer may not reach stays as it is, and the peer is told why."""

    @both_directions
    @pytest.mark.parametrize(("local_offset", "remote_offset"), [(1, 0), (-1, 0), (0, 1), (0, -1), (0, 1 << 40)])
    def test_bytes_outside_a_region_are_refused(self, pair: Pair, direction: Direction, local_offset: int, remote_offset: int) -> None:
        theirs, ours, remote = pair.regions(4096)
        assert isinstance(pair.failure(direction, Piece(ours, local_offset, remote, remote_offset, 4096)), InvalidArgument)
        assert (bytes(theirs.memory), bytes(ours.memory)) == (pattern(1, 4096), pattern(2, 4096))
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        assert ours.memory == theirs.memory

    @both_directions
    def test_a_region_said_to_be_larger_than_it_is(self, pair: Pair, direction: Direction) -> None:
        self.needs_checks()
        _, ours, remote = pair.regions(4096)
        piece = Piece(ours, 0, remote._replace(size_bytes=MIB), 1, 4096)
        assert isinstance(pair.failure(direction, piece), InvalidArgument)

    @both_directions
    def test_a_wrong_key_is_denied_also_after_the_right_one(self, pair: Pair, direction: Direction) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        wrong = Piece(ours, 0, remote._replace(key=remote.key ^ 1), 0, 4096)
        assert isinstance(pair.failure(direction, wrong), Denied)
        assert (bytes(theirs.memory), bytes(ours.memory)) == (pattern(1, 4096), pattern(2, 4096))
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        assert theirs.memory == ours.memory
        assert isinstance(pair.failure(direction, wrong), Denied)

    def test_the_read_key_lets_read_and_not_write(self, pair: Pair) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        piece = Piece(ours, 0, remote._replace(key=theirs.read_key), 0, 4096)
        pair.move(Direction.READ, piece)
        assert ours.memory == pattern(1, 4096)
        ours.memory[:] = bytes(4096)
        assert isinstance(pair.failure(Direction.WRITE, piece), Denied)
        assert theirs.memory == pattern(1, 4096)

    @both_directions
    def test_a_region_closed_by_its_owner_is_refused(self, pair: Pair, direction: Direction) -> None:
        self.needs_checks()
        theirs, ours, remote = pair.regions(4096)
        pair.move(direction, Piece(ours, 0, remote, 0, 4096))
        theirs.close()
        assert isinstance(pair.failure(direction, Piece(ours, 0, remote, 0, 4096)), (StaleHandle, Denied))

    @both_directions
    def test_an_unknown_region_is_refused(self, pair: Pair, direction: Direction) -> None:
        self.needs_checks()
        _, ours, remote = pair.regions(4096)
        piece = Piece(ours, 0, remote._replace(region_id=(1 << 62) + 1), 0, 4096)
        assert isinstance(pair.failure(direction, piece), (StaleHandle, Denied))

    def test_no_byte_lands_in_a_region_after_its_close(self, pair: Pair) -> None:
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
