"""Transports that are each wrong in one way, and the conformance suites over them. Not collected: test_conformance.py runs what must fail.

A class's `caught_by` names the tests of the suite that are to find the fault out; SOUND are the transports that the wrong ones are made of.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, KVStoreError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction, Rail, Request, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.exports import Exports
from kvstore.transfer.memory.pieces import regions_there
from kvstore.transfer.memory.region import Region
from kvstore.transfer.shm.agent import SharedMemoryAgent
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.tcp import TcpConnection
from kvstore.transfer.testing import agents as agent_conformance
from kvstore.transfer.testing import connections as connection_conformance
from kvstore.transfer.testing import fencing as fencing_conformance
from kvstore.transfer.testing import moving as moving_conformance
from kvstore.transfer.testing import scene as conformance_scene
from kvstore.transfer.testing import waiting as conformance_waiting
from kvstore.transfer.testing.conformance import AgentConformance, ConnectionConformance

BRIEF_S = 1.0


class Unsound:
    """What is awaited in vain is awaited briefly."""

    caught_by: ClassVar[Sequence[str]]

    @pytest.fixture(autouse=True)
    def brief(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (
            agent_conformance,
            connection_conformance,
            conformance_scene,
            conformance_waiting,
            fencing_conformance,
            moving_conformance,
        ):
            monkeypatch.setattr(module, "PATIENCE_S", 2 * BRIEF_S, raising=False)
            monkeypatch.setattr(module, "SOON_S", BRIEF_S, raising=False)


# --- connections ---


class TestSoundConnection(ConnectionConformance):
    connection_class: type[Connection] = TcpConnection


class DropsAByte(TcpConnection):
    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        data = b"".join(parts)
        super().send([data[: len(data) // 2] + data[len(data) // 2 + 1 :] + b"\0"[: len(data)]], deadline)


class TestDropsAByte(Unsound, TestSoundConnection):
    connection_class = DropsAByte
    caught_by = (
        "test_parts_of_all_sizes_arrive_whole_and_in_order",
        "test_thousands_of_small_parts_arrive_in_order",
        "test_views_of_any_memory_are_sent",
        "test_both_directions_at_once",
    )


class SwapsParts(TcpConnection):
    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        super().send(parts[::-1], deadline)


class TestSwapsParts(Unsound, TestSoundConnection):
    connection_class = SwapsParts
    caught_by = ("test_parts_of_all_sizes_arrive_whole_and_in_order", "test_many_calls_keep_their_order")


class SendsLater(TcpConnection):
    """Returns before the kernel has the bytes, which then are no longer what they were."""

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        threading.Timer(0.3, self._send_quietly, (parts, deadline)).start()

    def _send_quietly(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        with suppress(KVStoreError):
            super().send(parts, deadline)


class TestSendsLater(Unsound, TestSoundConnection):
    connection_class = SendsLater
    caught_by = ("test_what_was_sent_may_be_changed_afterwards",)


class ReceivesLater(TcpConnection):
    """Gives up at the deadline, but what comes then is still written to the memory."""

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        over, errors = threading.Event(), list[KVStoreError]()

        def receive() -> None:
            try:
                super(ReceivesLater, self).recv_into(parts, Deadline(10))
            except KVStoreError as error:
                errors.append(error)
            over.set()

        threading.Thread(target=receive, daemon=True).start()
        if not over.wait(deadline.left_s()):
            raise deadline.exceeded()
        if errors:
            raise errors[0]


class TestReceivesLater(Unsound, TestSoundConnection):
    connection_class = ReceivesLater
    caught_by = ("test_nothing_is_written_to_the_parts_after_an_error",)


class StaysOpen(TcpConnection):
    @property
    def is_open(self) -> bool:
        return True


class TestStaysOpen(Unsound, TestSoundConnection):
    connection_class = StaysOpen
    caught_by = (
        "test_a_silent_peer_is_given_up_at_the_deadline",
        "test_a_peer_that_hangs_up_is_unreachable",
        "test_closing_twice_is_closing_once",
    )


class WaitsTooLong(TcpConnection):
    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        super().recv_into(parts, Deadline(deadline.left_s() + 2 * BRIEF_S))


class TestWaitsTooLong(Unsound, TestSoundConnection):
    connection_class = WaitsTooLong
    caught_by = ("test_a_silent_peer_is_given_up_at_the_deadline",)


class DoesNotSeeStalls(TcpConnection):
    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        self.stall_timeout_s = float("inf")
        super().recv_into(parts, deadline)


class TestDoesNotSeeStalls(Unsound, TestSoundConnection):
    connection_class = DoesNotSeeStalls
    caught_by = ("test_a_peer_that_stalls_is_given_up_before_the_deadline",)


class ClosesAsleep(TcpConnection):
    """Does not wake who waits inside."""

    def _hang_up(self) -> None:
        pass


class TestClosesAsleep(Unsound, TestSoundConnection):
    connection_class = ClosesAsleep
    caught_by = ("test_closing_ends_a_receive_in_another_thread",)


class BlamesThePeer(TcpConnection):
    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        try:
            super().recv_into(parts, deadline)
        except Closed as error:
            raise Unreachable(str(error)) from None


class TestBlamesThePeer(Unsound, TestSoundConnection):
    connection_class = BlamesThePeer
    caught_by = ("test_a_closed_connection_says_so", "test_closing_ends_a_receive_in_another_thread")


class TakesGarbage(TcpConnection):
    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        return super().connect(metadata if metadata.startswith(b"tcp1 ") else b"tcp1 127.0.0.1:1", rail, deadline)


class TestTakesGarbage(Unsound, TestSoundConnection):
    connection_class = TakesGarbage
    caught_by = ("test_garbage_for_metadata_is_refused[3]",)


class LeaksDescriptors(TcpConnection):
    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        os.dup(0)
        return super().connect(metadata, rail, deadline)


class TestLeaksDescriptors(Unsound, TestSoundConnection):
    connection_class = LeaksDescriptors
    caught_by = ("test_closed_connections_leave_neither_descriptors_nor_threads",)


class TellsNothing(TcpConnection):
    """Its descriptor is never readable."""

    def fileno(self) -> int:
        return _never_readable


_never_readable = os.eventfd(0)


class TestTellsNothing(Unsound, TestSoundConnection):
    connection_class = TellsNothing
    caught_by = ("test_its_descriptor_tells_of_bytes_and_of_a_hang_up",)


# --- agents ---


class TestSoundAgent(AgentConformance):
    fences_closed_regions = False
    agent_class: type[SharedMemoryAgent] = SharedMemoryAgent

    def make_agent(self, name: str) -> TransferAgent:
        return self.agent_class(name, Rail(), TransferSettings())


class AnyKey(Exports):
    def find(self, region_id: int, key: int, *, writing: bool) -> Region:
        region = self._regions.get(region_id)
        return super().find(region_id, region.write_key if region is not None else key, writing=writing)


class TestIgnoresKeys(Unsound, TestSoundAgent):
    caught_by = (
        "test_a_wrong_key_is_denied_also_after_the_right_one[Direction.READ]",
        "test_a_wrong_key_is_denied_also_after_the_right_one[Direction.WRITE]",
        "test_the_read_key_lets_read_and_not_write",
    )

    def make_agent(self, name: str) -> TransferAgent:
        return SharedMemoryAgent(name, Rail(), TransferSettings(), exports=AnyKey())


class FinishesTwice(SharedMemoryAgent):
    def run(self, request: Request) -> None:
        super().run(request)
        with suppress(AssertionError):
            request.finish()


class TestFinishesTwice(Unsound, TestSoundAgent):
    agent_class = FinishesTwice
    caught_by = ("test_requests_under_way_at_once_are_each_over_once",)


class MovesAfterFinish(SharedMemoryAgent):
    """A cancelled request is over at once, and its bytes move with the next one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        if len(request.pieces) == 1 and request.size_bytes == 64 << 20:
            self._waiting.append(request)
            return
        for late in self._waiting:
            late.state = time.monotonic_ns()
            with suppress(KVStoreError):
                self._copy(late.remote, late)
        super().submit(request)

    def cancel(self, request: Request) -> None:
        if not request.is_over:
            request.finish(cancelled())


class TestMovesAfterFinish(Unsound, TestSoundAgent):
    agent_class = MovesAfterFinish
    caught_by = (
        "test_a_cancelled_request_ends_and_leaves_memory_alone[Direction.READ]",
        "test_a_cancelled_request_ends_and_leaves_memory_alone[Direction.WRITE]",
    )


class MovesNothing(SharedMemoryAgent):
    def _copy(self, peer: Any, request: Request) -> None:
        self._reach(peer, request, regions_there(request.pieces))


class TestMovesNothing(Unsound, TestSoundAgent):
    agent_class = MovesNothing
    caught_by = ("test_bytes_are_read_and_written", "test_transfer_waits_for_its_request", "test_one_piece_of_64_mib[Direction.READ]")


class MovesTooMuch(SharedMemoryAgent):
    """Rounds up, as if to whole words."""

    def _copy(self, peer: Any, request: Request) -> None:
        super()._copy(peer, request)
        for piece in request.pieces:
            if request.direction is Direction.READ and piece.local_offset + piece.size_bytes < piece.local.size_bytes:
                piece.local.memory[piece.local_offset + piece.size_bytes] = 0x55


class TestMovesTooMuch(Unsound, TestSoundAgent):
    agent_class = MovesTooMuch
    caught_by = ("test_only_the_bytes_asked_for_are_touched",)


class LosesTheLastPiece(SharedMemoryAgent):
    def _copy(self, peer: Any, request: Request) -> None:
        whole, request.pieces = request.pieces, request.pieces[:-1]
        super()._copy(peer, request)
        request.pieces = whole


class TestLosesTheLastPiece(Unsound, TestSoundAgent):
    agent_class = LosesTheLastPiece
    caught_by = ("test_thousands_of_scattered_pieces[Direction.READ]", "test_thousands_of_scattered_pieces[Direction.WRITE]")


class IgnoresBounds(SharedMemoryAgent):
    """Cuts what is asked for beyond the end, and calls it a success."""

    def submit(self, request: Request) -> None:
        request.pieces = [
            piece._replace(size_bytes=min(piece.size_bytes, piece.remote.size_bytes - piece.remote_offset)) for piece in request.pieces
        ]
        super().submit(request)


class TestIgnoresBounds(Unsound, TestSoundAgent):
    agent_class = IgnoresBounds
    caught_by = ("test_bytes_outside_a_region_are_refused[0-1-Direction.READ]",)


class ReordersNotifications(SharedMemoryAgent):
    def notifications(self) -> list[tuple[str, bytes]]:
        return super().notifications()[::-1]


class TestReordersNotifications(Unsound, TestSoundAgent):
    agent_class = ReordersNotifications
    caught_by = ("test_notifications_keep_their_order",)


class SucceedsOnceClosed(SharedMemoryAgent):
    def submit(self, request: Request) -> None:
        if self._is_closed:
            request.finish()
        else:
            super().submit(request)


class TestSucceedsOnceClosed(Unsound, TestSoundAgent):
    agent_class = SucceedsOnceClosed
    caught_by = ("test_a_closed_agent_says_so",)


class WaitsForTheDead(SharedMemoryAgent):
    """A peer that is gone looks slow."""

    def _copy(self, peer: Any, request: Request) -> None:
        try:
            super()._copy(peer, request)
        except Unreachable:
            threading.Event().wait(4 * BRIEF_S)
            raise DeadlineExceeded("no answer") from None


class TestWaitsForTheDead(Unsound, TestSoundAgent):
    agent_class = WaitsForTheDead
    caught_by = ("test_a_peer_that_was_never_met_and_is_gone_is_unreachable",)


class LeaksAThread(SharedMemoryAgent):
    def close(self) -> None:
        super().close()
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


class TestLeaksAThread(Unsound, TestSoundAgent):
    agent_class = LeaksAThread
    caught_by = ("test_closed_agents_leave_neither_descriptors_nor_threads",)


SOUND: tuple[type, ...] = (TestSoundConnection, TestSoundAgent)


def unsound() -> Iterator[tuple[type[Unsound], str]]:
    """(suite, test that must fail)."""
    for suite in Unsound.__subclasses__():
        for test in suite.caught_by:
            yield suite, test
