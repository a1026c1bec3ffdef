"""Conformance of agents: the bytes asked for are moved, no others, and each request is over once, however many there are at once."""

from functools import partial

from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction, TransferAgent
from kvstore.transfer.memory.pieces import table_of
from kvstore.transfer.memory.region import Piece, Region
from kvstore.transfer.testing.peer import PeerProcess, pattern, remote_region
from kvstore.transfer.testing.scene import Pair, ask, outcome, whole
from kvstore.transfer.testing.suite import MIB, AgentSuite, both_directions
from kvstore.transfer.testing.waiting import PATIENCE_S, eventually, in_background


class AgentMoves(AgentSuite):
    """Requests of every shape, one after another and at once, in both directions."""

    def test_bytes_are_read_and_written(self, pair: Pair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        pair.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
        assert ours.memory == theirs.memory == pattern(1, MIB)
        ours.memory[:] = pattern(3, MIB)
        pair.move(Direction.WRITE, Piece(ours, 0, remote, 0, MIB))
        assert ours.memory == theirs.memory == pattern(3, MIB)

    def test_only_the_bytes_asked_for_are_touched(self, pair: Pair) -> None:
        theirs, ours, remote = pair.regions(10_000)
        one, two = pattern(1, 10_000), pattern(2, 10_000)
        pair.move(Direction.READ, Piece(ours, 101, remote, 4999, 3001))
        assert ours.memory == two[:101] + one[4999:8000] + two[3102:]
        pair.move(Direction.WRITE, Piece(ours, 50, remote, 1, 7))
        assert theirs.memory == one[:1] + two[50:57] + one[8:]

    @both_directions
    def test_thousands_of_scattered_pieces(self, pair: Pair, direction: Direction) -> None:
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
    def test_pieces_of_odd_sizes_in_several_regions(self, pair: Pair, direction: Direction) -> None:
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
    def test_a_table_of_pieces_is_moved_as_a_list_is(self, pair: Pair, direction: Direction) -> None:
        """The engine hands on what came as columns (`Runs`) as a PieceTable."""
        size_bytes, count = 300, 500
        regions = [pair.regions(2 * size_bytes * count) for _ in range(3)]
        pieces = [
            Piece(regions[at % 3][1], at * size_bytes, regions[at % 2][2], 2 * at * size_bytes, at % size_bytes) for at in range(count)
        ]
        ask(pair.user, direction, pair.remote, table_of(pieces)).wait(Deadline(PATIENCE_S))
        before = pattern(1 if direction is Direction.READ else 2, 2 * size_bytes * count)
        for at, piece in enumerate(pieces):
            begin = piece.remote_offset if direction is Direction.READ else piece.local_offset
            moved = before[begin : begin + piece.size_bytes]
            assert piece.local.part(piece.local_offset, piece.size_bytes) == moved
            assert regions[at % 2][0].part(piece.remote_offset, piece.size_bytes) == moved

    @both_directions
    def test_one_piece_of_64_mib(self, pair: Pair, direction: Direction) -> None:
        theirs, ours, remote = pair.regions(64 * MIB)
        pair.move(direction, Piece(ours, 0, remote, 0, 64 * MIB))
        assert ours.memory == theirs.memory == pattern(1 if direction is Direction.READ else 2, 64 * MIB)

    @both_directions
    def test_no_pieces_are_a_success(self, pair: Pair, direction: Direction) -> None:
        assert pair.failure(direction) is None

    def test_transfer_waits_for_its_request(self, pair: Pair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        for _ in range(20):
            pair.user.transfer(Direction.READ, pair.remote, [Piece(ours, 0, remote, 0, MIB)], Deadline(PATIENCE_S))
            assert ours.memory == theirs.memory
            ours.memory[:] = bytes(MIB)
        eventually(lambda: ours.users == 0, "the region is released")

    def test_requests_under_way_at_once_are_each_over_once(self, pair: Pair) -> None:
        size_bytes, count = 100_000, 100
        theirs, ours, remote = pair.regions(size_bytes * count)
        pieces = [Piece(ours, at, remote, at, size_bytes) for at in range(0, size_bytes * count, size_bytes)]
        requests = [ask(pair.user, Direction.READ, pair.remote, [piece]) for piece in pieces]
        assert [outcome(request) for request in requests] == [None] * count
        assert ours.memory == theirs.memory
        pair.user.close()
        assert [request.finish_count for request in requests] == [1] * count
        eventually(lambda: ours.users == 0, "the region is released")

    def test_threads_share_an_agent(self, pair: Pair) -> None:
        _, ours, remote = pair.regions(4 * MIB)

        def write_and_read_back(part: int) -> bool:
            pieces = [Piece(ours, part * MIB, remote, part * MIB, MIB)]
            view, is_same = ours.part(part * MIB, MIB), True
            for number in range(20):
                view[:] = data = pattern(100 * part + number, MIB)
                pair.user.transfer(Direction.WRITE, pair.remote, pieces, Deadline(PATIENCE_S))
                view[:] = bytes(MIB)
                pair.user.transfer(Direction.READ, pair.remote, pieces, Deadline(PATIENCE_S))
                is_same = is_same and view == data
            return is_same

        workers = [in_background(partial(write_and_read_back, part)) for part in range(4)]
        assert [worker.result(PATIENCE_S) for worker in workers] == [True] * 4

    def test_two_agents_serve_each_other_at_once(self, pair: Pair) -> None:
        def write_to(mine: TransferAgent, peer: TransferAgent, seed: int) -> Region:
            source, target = pair.memory.allocate(MIB, pattern(seed, MIB)), pair.memory.allocate(MIB)
            remote, pieces = mine.load_remote(peer.metadata()), [Piece(source, 0, remote_region(peer, target), 0, MIB)]
            for _ in range(50):
                mine.transfer(Direction.WRITE, remote, pieces, Deadline(PATIENCE_S))
            return target

        other = in_background(lambda: write_to(pair.owner, pair.user, 1))
        assert write_to(pair.user, pair.owner, 2).memory == pattern(2, MIB)
        assert other.result(PATIENCE_S).memory == pattern(1, MIB)

    def test_a_forgotten_peer_can_be_loaded_again(self, pair: Pair) -> None:
        theirs, ours, remote = pair.regions(MIB)
        for _ in range(3):
            ours.memory[:] = bytes(MIB)
            pair.move(Direction.READ, Piece(ours, 0, remote, 0, MIB))
            assert ours.memory == theirs.memory
            pair.user.unload_remote(pair.remote)
            pair.remote = pair.user.load_remote(pair.owner.metadata())

    def test_a_peer_of_another_process(self, pair: Pair, peer: PeerProcess) -> None:
        size_bytes = peer.region.size_bytes
        ours, pieces = whole(pair, peer)
        pair.move(Direction.READ, *pieces)
        assert ours.memory == peer.content
        ours.memory[:] = written = pattern(9, size_bytes)
        pair.move(Direction.WRITE, *pieces)
        ours.memory[:] = bytes(size_bytes)
        pair.move(Direction.READ, *pieces)
        assert ours.memory == written
