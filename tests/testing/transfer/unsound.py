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

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer import agents as agent_conformance
from kvstore.testing.transfer import connections as connection_conformance
from kvstore.testing.transfer import peer as conformance_scene
from kvstore.testing.transfer import waiting as conformance_waiting
from kvstore.testing.transfer.agents import AgentConformance
from kvstore.testing.transfer.connections import ConnectionConformance
from kvstore.transfer.agent import Direction, Rail, Request, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.shm.agent import SharedMemoryAgent
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.tcp import TcpConnection

BRIEF_S = 1.0


class Unsound:
    """What is awaited in vain is awaited briefly."""

    caught_by: ClassVar[Sequence[str]]

    @pytest.fixture(autouse=True)
    def brief(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (agent_conformance, connection_conformance, conformance_scene, conformance_waiting):
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
    caught_by = ("test_parts_of_all_sizes_arrive_whole_and_in_order",)


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
    caught_by = ("test_a_peer_that_hangs_up_is_unreachable",)


class ClosesAsleep(TcpConnection):
    """Does not wake who waits inside."""

    def _hang_up(self) -> None:
        pass


class TestClosesAsleep(Unsound, TestSoundConnection):
    connection_class = ClosesAsleep
    caught_by = ("test_closing_ends_a_receive_in_another_thread",)


class LeaksDescriptors(TcpConnection):
    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        os.dup(0)
        return super().connect(metadata, rail, deadline)


class TestLeaksDescriptors(Unsound, TestSoundConnection):
    connection_class = LeaksDescriptors
    caught_by = ("test_closed_connections_leave_neither_descriptors_nor_threads",)


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
    caught_by = ("test_a_wrong_key_is_denied_also_after_the_right_one[Direction.READ]", "test_the_read_key_lets_read_and_not_write")

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
    caught_by = ("test_a_cancelled_request_ends_and_leaves_memory_alone[Direction.READ]",)


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


class ReordersNotifications(SharedMemoryAgent):
    def notifications(self) -> list[tuple[str, bytes]]:
        return super().notifications()[::-1]


class TestReordersNotifications(Unsound, TestSoundAgent):
    agent_class = ReordersNotifications
    caught_by = ("test_notifications_keep_their_order",)


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


SOUND: tuple[type, ...] = (TestSoundConnection, TestSoundAgent)


def unsound() -> Iterator[tuple[type[Unsound], str]]:
    """(suite, test that must fail)."""
    for suite in Unsound.__subclasses__():
        for test in suite.caught_by:
            yield suite, test
