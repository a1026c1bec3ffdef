"""What every transfer agent must do: see conformance.py. Here: names and descriptions, peers that fail, notifications, and the end."""

from contextlib import suppress
from typing import Final

import pytest

from kvstore.protocol.errors import Cancelled, Closed, DeadlineExceeded, ProtocolError, Retry, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.region import Piece
from kvstore.transfer.testing.fencing import AgentFences
from kvstore.transfer.testing.moving import AgentMoves
from kvstore.transfer.testing.peer import PeerProcess, RegionAllocator, pattern, remote_region
from kvstore.transfer.testing.scene import MARK, Pair, ask, is_overwritten, notifications, outcome, overwrite, whole
from kvstore.transfer.testing.suite import MIB, both_directions
from kvstore.transfer.testing.waiting import PATIENCE_S, SHORT_S, SOON_S, assert_nothing_is_left, eventually, within

MAX_METADATA_BYTES: Final = 64 << 10
GARBAGE: Final = [b"", b"\0", b"\xff" * 100, b"garbage", bytes(range(256)) * 256]


class AgentConformance(AgentMoves, AgentFences):
    """What any transfer agent does."""

    def test_it_is_called_as_it_was_made(self, pair: Pair) -> None:
        assert pair.user.name == "user"
        assert pair.user.transport

    def test_descriptions_are_small(self, pair: Pair) -> None:
        assert 0 < len(pair.owner.metadata()) <= MAX_METADATA_BYTES
        _, _, remote = pair.regions(8 * MIB)
        assert len(remote.descriptors[pair.owner.transport]) <= MAX_METADATA_BYTES

    @pytest.mark.parametrize("metadata", GARBAGE, ids=range(len(GARBAGE)))
    def test_garbage_for_metadata_is_refused(self, pair: Pair, metadata: bytes) -> None:
        with pytest.raises(ProtocolError):
            pair.user.load_remote(metadata)

    def test_a_peer_that_closed_is_unreachable_and_others_are_served(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(MIB)
        pair.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
        pair.owner.close()
        self.becomes_unreachable(pair, Piece(ours, 0, remote, 0, MIB))
        self.serves_others(pair)

    def test_a_peer_that_was_never_met_and_is_gone_is_unreachable(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(MIB)
        pair.owner.close()
        self.becomes_unreachable(pair, Piece(ours, 0, remote, 0, MIB))
        self.serves_others(pair)

    def test_a_killed_peer_is_unreachable_and_others_are_served(self, pair: Pair, peer: PeerProcess) -> None:
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
    def test_a_stalled_peer_is_given_up_and_memory_left_alone(self, pair: Pair, peer: PeerProcess, direction: Direction) -> None:
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

    def test_a_deadline_that_is_over_is_no_reason_to_wait(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(4096)
        request = ask(pair.user, Direction.READ, pair.remote, [Piece(ours, 0, remote, 0, 4096)], timeout_s=0.0)
        with within(0.0):
            assert isinstance(outcome(request), (DeadlineExceeded, type(None)))

    @both_directions
    def test_a_cancelled_request_ends_and_leaves_memory_alone(self, pair: Pair, direction: Direction) -> None:
        theirs, ours, remote = pair.regions(64 * MIB)
        requests = [ask(pair.user, direction, pair.remote, [Piece(ours, 0, remote, 0, 64 * MIB)]) for _ in range(3)]
        for request in requests:
            pair.user.cancel(request)
            pair.user.cancel(request)
        assert all(isinstance(outcome(request), (Cancelled, type(None))) for request in requests)
        overwrite(ours)
        self.succeeds_again(pair, Piece(pair.memory.allocate(4096), 0, remote, 0, 4096))
        assert is_overwritten(ours)
        assert MARK not in bytes(theirs.memory)
        assert [request.finish_count for request in requests] == [1, 1, 1]

    def test_cancelling_what_is_over_does_nothing(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(4096)
        request = ask(pair.user, Direction.READ, pair.remote, [Piece(ours, 0, remote, 0, 4096)])
        assert outcome(request) is None
        pair.user.cancel(request)
        assert (request.error, request.finish_count) == (None, 1)

    def test_a_notification_comes_after_the_writes_before_it(self, pair: Pair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        for number in range(1, 21):
            ours.memory[:] = bytes([number]) * MIB
            pair.move(Direction.WRITE, Piece(ours, 0, remote, 0, MIB))
            pair.user.notify(pair.remote, bytes([number]), Deadline(PATIENCE_S))
            assert notifications(pair.owner, 1) == [("user", bytes([number]))]
            assert theirs.memory == bytes([number]) * MIB

    def test_notifications_keep_their_order(self, pair: Pair) -> None:
        messages = [number.to_bytes(2) for number in range(200)] + [pattern(1, MAX_METADATA_BYTES)]
        for message in messages:
            pair.user.notify(pair.remote, message, Deadline(PATIENCE_S))
        assert notifications(pair.owner, len(messages)) == [("user", message) for message in messages]
        assert pair.owner.notifications() == []

    def test_closing_ends_requests_under_way(self, pair: Pair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        pair.move(Direction.READ, *pieces)
        with peer.stopped():
            requests = [ask(pair.user, Direction.READ, pair.remote, pieces) for _ in range(3)]
            with within(0.0):
                pair.user.close()
            assert all(isinstance(outcome(request), (Closed, type(None))) for request in requests)
        assert [request.finish_count for request in requests] == [1, 1, 1]

    def test_a_closed_agent_says_so(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(4096)
        pair.user.close()
        pair.user.close()
        assert isinstance(pair.failure(Direction.READ, Piece(ours, 0, remote, 0, 4096)), Closed)

    def test_closed_agents_leave_neither_descriptors_nor_threads(self, memory: RegionAllocator) -> None:
        theirs, ours = memory.allocate(MIB), memory.allocate(MIB)

        def open_and_close() -> None:
            pair = Pair(self.make_agent("owner"), self.make_agent("user"), memory)
            pair.move(Direction.WRITE, Piece(ours, 0, remote_region(pair.owner, theirs), 0, MIB))
            pair.user.notify(pair.remote, b"bye", Deadline(PATIENCE_S))
            pair.user.close()
            pair.owner.close()

        open_and_close()  # what a library makes once, at its first use, is not a leak
        assert_nothing_is_left(open_and_close)

    def becomes_unreachable(self, pair: Pair, *pieces: Piece) -> None:
        """Each request ends within its deadline, and soon they fail: an agent may need one to notice."""
        error = None
        with within(PATIENCE_S):
            while error is None:
                with within(1.0):
                    error = outcome(ask(pair.user, Direction.READ, pair.remote, pieces, timeout_s=1.0))
        assert isinstance(error, (Unreachable, DeadlineExceeded))

    def serves_others(self, pair: Pair) -> None:
        other = self.make_agent("other")
        try:
            others = Pair(other, pair.user, pair.memory)
            theirs, ours, remote = others.regions(MIB)
            others.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
            assert ours.memory == theirs.memory
        finally:
            other.close()

    def succeeds_again(self, pair: Pair, *pieces: Piece) -> None:
        """A peer that came back is reached, if not at once: the connection may have to be made anew."""

        def succeeds() -> bool:
            return outcome(ask(pair.user, Direction.READ, pair.remote, pieces, timeout_s=SOON_S)) is None

        eventually(succeeds, "the peer is reached again")
