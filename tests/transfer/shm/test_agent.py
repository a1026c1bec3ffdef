"""Shared memory is an agent, and what only it does: against agents of this process, of another one, and peers that the tests play."""

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unreachable,
)
from kvstore.protocol.frames import HEADER_BYTES, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.session_messages import Ok, Welcome
from kvstore.protocol.transfers import SERVER_AGENT
from kvstore.rpc.address import socket_id
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.agents import AgentConformance
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually, in_background, within
from kvstore.testing.transfer.peer import move
from kvstore.transfer.agent import AgentRequest, Direction, Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapped_memory import allocate
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion
from kvstore.transfer.shm.agent import MAGIC, SharedMemoryAgent, _PeerProcess
from tests.no_threads import no_more_threads
from tests.rpc.wires import frame, read_exactly
from tests.transfer.shm.owner import SharedOwner

SIZE = 8192
SETTINGS = TransferSettings(copy_threads=1, connect_timeout_s=1)


class TestSharedMemory(AgentConformance):
    fences_closed_regions = False

    def make_agent(self, name: str) -> TransferAgent:
        return SharedMemoryAgent(name, Rail(), TransferSettings())


@pytest.fixture
def agent() -> Iterator[SharedMemoryAgent]:
    agent = SharedMemoryAgent("user", Rail(), SETTINGS)
    yield agent
    agent.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[SharedOwner]:
    with SharedOwner(tmp_path, count=4, size_bytes=SIZE) as owner:
        yield owner


@pytest.fixture
def ours() -> Iterator[Region]:
    region = allocate(SIZE)
    yield region
    region.close()


def read(agent: TransferAgent, remote: Any, ours: Region, theirs: RemoteRegion, *, timeout_s: float = 10) -> None:
    move(agent, Direction.READ, remote, [Piece(ours, 0, theirs, 0, ours.size_bytes)], timeout_s=timeout_s)


def write(agent: TransferAgent, remote: Any, ours: Region, theirs: RemoteRegion) -> None:
    move(agent, Direction.WRITE, remote, [Piece(ours, 0, theirs, 0, ours.size_bytes)])


def asked(remote: Any, ours: Region, theirs: RemoteRegion, callback: Callable[[AgentRequest], None] | None = None) -> AgentRequest:
    return AgentRequest(Direction.READ, remote, [Piece(ours, 0, theirs, 0, SIZE)], Deadline(10), callback)


def ending(request: AgentRequest) -> KVStoreError | None:
    with suppress(KVStoreError):
        request.wait(Deadline(10))
    assert request.is_over
    return request.error


def exported(owner: TransferAgent, region: Region) -> RemoteRegion:
    descriptor = owner.export(region)
    assert descriptor is not None
    return RemoteRegion(region.region_id, region.size_bytes, region.write_key, {"shm": descriptor})


def mappings() -> int:
    """Of regions, in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kvstore-region")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- who is reached ---


def test_a_socket_path_of_another_file_is_unreachable(agent: SharedMemoryAgent, owner: SharedOwner, tmp_path: Path) -> None:
    """As in another container: the path is there too, and a process that listens."""
    told, _, path = owner.metadata.partition(b" ")[2].partition(b" ")
    os.rename(path, path + b" of another container")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(Unreachable, match="in another container"):
            agent.load_remote(owner.metadata)
    os.unlink(path)
    assert told.decode() == socket_id(os.fsdecode(path + b" of another container"))


@pytest.mark.promise("right-daemon")
def test_another_process_at_the_socket_is_not_the_peer(agent: SharedMemoryAgent, impostor: "Impostor", ours: Region) -> None:
    remote = agent.load_remote(impostor.metadata)
    impostor.host_id = "another"
    impostor.answers()
    with pytest.raises(Unreachable, match="now belongs to another process, 'impostor'"):
        read(agent, remote, ours, REMOTE)
    agent.unload_remote(remote)


def test_an_agent_without_listener_exports_nothing() -> None:
    agent = SharedMemoryAgent("user", Rail(), SETTINGS, listens=False)
    region = allocate(1)
    assert agent.export(region) is None
    assert agent.notifications() == []
    with pytest.raises(ProtocolError):
        agent.load_remote(agent.metadata())
    agent.close()
    region.close()


def test_memory_that_is_not_shared_is_not_reached(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    assert agent.export(Region(memoryview(bytearray(1)))) is None
    remote, region = agent.load_remote(owner.metadata), owner.regions[0]
    for wrong in (region._replace(descriptors={}), region._replace(descriptors={"shm": b"123"}), region._replace(region_id=0)):
        with pytest.raises(InvalidArgument, match="not shared memory"):
            read(agent, remote, ours, wrong)


# --- another process ---


def test_many_regions_are_read_without_keeping_descriptors(agent: SharedMemoryAgent, tmp_path: Path) -> None:
    with SharedOwner(tmp_path, count=300, size_bytes=SIZE) as owner:
        remote, ours = agent.load_remote(owner.metadata), allocate(300 * SIZE)
        read(agent, remote, allocate(SIZE), owner.regions[0])
        here, there, mapped = descriptors(), owner.descriptors(), mappings()
        pieces = [Piece(ours, number * SIZE, region, 0, SIZE) for number, region in enumerate(owner.regions)]
        move(agent, Direction.READ, remote, pieces)
        assert all(ours.part(number * SIZE, SIZE) == bytes([number % 256]) * SIZE for number in range(300))
        assert descriptors() == here
        # The owner closes what it has sent after it was answered: the count of before may have one more in it.
        eventually(lambda: owner.descriptors() <= there, "no descriptor of a region stays with its owner")
        assert mappings() == mapped + 299
        agent.unload_remote(remote)
        eventually(lambda: mappings() == mapped - 1, "all of them are unmapped")
        ours.close()


def test_a_closed_mapped_region_is_refused_and_unmapped(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    remote, before = agent.load_remote(owner.metadata), mappings()
    for region in owner.regions:
        read(agent, remote, ours, region)
        write(agent, remote, ours, region)
    assert mappings() == before + 8
    owner.close_region(1)
    owner.close_region(2)
    with pytest.raises(StaleHandle):
        read(agent, remote, ours, owner.regions[1])
    read(agent, remote, ours, owner.regions[0])
    assert mappings() == before + 4


def test_a_killed_owner_is_unreachable_and_its_memory_goes(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    remote, before, files = agent.load_remote(owner.metadata), mappings(), descriptors()
    read(agent, remote, ours, owner.regions[0])
    owner.kill()
    with pytest.raises(Unreachable):
        read(agent, remote, ours, owner.regions[0])
    assert (mappings(), descriptors()) == (before, files - 1), "the one less is where the process's status came from"
    with pytest.raises(Unreachable):
        agent.notify(remote, b"lost", Deadline(10))


def test_a_stopped_owner_is_soon_unreachable(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    remote = agent.load_remote(owner.metadata)
    read(agent, remote, ours, owner.regions[0])
    owner.stop()
    with within(1), pytest.raises(Unreachable, match="did not respond within 1 s"):
        read(agent, remote, ours, owner.regions[1], timeout_s=100)
    owner.go_on()
    read(agent, remote, ours, owner.regions[1])
    assert ours.memory == bytes([1]) * SIZE


def test_waiting_for_a_stopped_owner_ends_at_the_deadline(owner: SharedOwner, ours: Region) -> None:
    agent = SharedMemoryAgent("user", Rail(), TransferSettings(connect_timeout_s=30))
    remote = agent.load_remote(owner.metadata)
    read(agent, remote, ours, owner.regions[0])
    owner.stop()
    first = in_background(lambda: read(agent, remote, ours, owner.regions[1], timeout_s=100))
    eventually(remote.lock.locked, "the first waits for the owner")
    second = asked(remote, allocate(SIZE), owner.regions[2])
    second.deadline = Deadline(0.05)
    agent.submit(second)
    assert isinstance(ending(second), DeadlineExceeded)
    assert not first.done()
    owner.go_on()
    first.result(10)
    agent.close()


def test_only_one_request_waits_for_a_stopped_owners_timeout(
    agent: SharedMemoryAgent, owner: SharedOwner, busy: threading.Event, ours: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive timeouts would block the threads for all other copies."""
    attempts, attempt = list[Any](), agent._attempt

    def noted(*who: Any) -> Any:
        attempts.append(who)
        return attempt(*who)

    monkeypatch.setattr(agent, "_attempt", noted)
    remote = agent.load_remote(owner.metadata)
    read(agent, remote, ours, owner.regions[0])
    owner.stop()
    requests = [asked(remote, allocate(SIZE), owner.regions[1]) for _ in range(5)]
    for request in requests:
        agent.submit(request)
    attempts.clear()
    busy.set()
    assert [type(ending(request)) for request in requests] == [Unreachable] * 5
    assert len(attempts) == 1
    owner.go_on()
    read(agent, remote, ours, owner.regions[1])


# --- what becomes of requests ---


@pytest.fixture
def busy(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> Iterator[threading.Event]:
    """The agent's only thread is busy until this is set: it is in the callback of a request."""
    is_busy, go_on = threading.Event(), threading.Event()

    def keep(request: AgentRequest) -> None:
        is_busy.set()
        go_on.wait(30)

    agent.submit(asked(agent.load_remote(owner.metadata), ours, owner.regions[0], keep))
    assert is_busy.wait(10)
    yield go_on
    go_on.set()


def test_a_request_whose_caller_runs_it_wakes_no_thread(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    request = asked(agent.load_remote(owner.metadata), ours, owner.regions[1])
    request.caller_runs = True
    agent.submit(request)
    assert not any(thread.name.startswith("kvstore-shm-copy") for thread in threading.enumerate())
    assert not request.is_over
    agent.run(request)
    agent.run(request)
    assert ending(request) is None


def test_unload_ends_only_the_peers_requests(agent: SharedMemoryAgent, owner: SharedOwner, busy: threading.Event, ours: Region) -> None:
    one, two = (agent.load_remote(owner.metadata) for _ in range(2))
    requests = [asked(remote, ours, owner.regions[1]) for remote in (one, two)]
    for request in requests:
        agent.submit(request)
    agent.unload_remote(one)
    agent.unload_remote(one)
    assert isinstance(ending(requests[0]), Unreachable)
    assert not requests[1].is_over
    busy.set()
    assert ending(requests[1]) is None
    with pytest.raises(Unreachable, match="unloaded"):
        read(agent, one, ours, owner.regions[0])
    with pytest.raises(Unreachable, match="unloaded"):
        agent.notify(one, b"x", Deadline(10))


def test_unload_does_not_wait_for_copies(agent: SharedMemoryAgent, owner: SharedOwner, ours: Region) -> None:
    remote = agent.load_remote(owner.metadata)
    assert isinstance(remote, _PeerProcess)
    read(agent, remote, ours, owner.regions[0])
    assert remote.mapped
    with remote.lock:
        in_background(lambda: agent.unload_remote(remote)).result(PATIENCE_S)
        with pytest.raises(Unreachable, match="unloaded"):
            read(agent, remote, ours, owner.regions[0])
    eventually(lambda: not remote.mapped, "it is unmapped")


def test_what_no_thread_took_is_not_kept_for_one(
    agent: SharedMemoryAgent, owner: SharedOwner, ours: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(agent.load_remote(owner.metadata), ours, owner.regions[2])
    before = sys.getrefcount(request)
    no_more_threads(monkeypatch)
    agent.submit(request)
    assert ending(request) is None
    assert sys.getrefcount(request) == before


class FaultyDeadline(Deadline):
    """Acts at the `number`th check, as if that happened during the request."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__(10)
        self._number, self._act = number, act

    def left_s(self) -> float:
        self._number -= 1
        if not self._number:
            self._act()
        return super().left_s()


def many_pieces(remote: Any, ours: Region, theirs: RemoteRegion) -> AgentRequest:
    return AgentRequest(Direction.WRITE, remote, [Piece(ours, at, theirs, at, 1) for at in range(SIZE)], Deadline(10), caller_runs=True)


def carried_out(agent: SharedMemoryAgent, request: AgentRequest, act: Callable[[], None]) -> None:
    """Runs `act` in the middle of a copy."""
    request.deadline = FaultyDeadline(20, act)
    agent.submit(request)
    agent.run(request)


def test_cancelling_stops_a_request_in_the_middle(agent: SharedMemoryAgent, ours: Region) -> None:
    theirs, remote = allocate(SIZE), agent.load_remote(agent.metadata())
    ours.memory[:] = b"x" * SIZE
    request = many_pieces(remote, ours, exported(agent, theirs))
    carried_out(agent, request, lambda: agent.cancel(request))
    assert isinstance(request.error, Cancelled)
    moved = bytes(theirs.memory).count(b"x")
    assert 0 < moved < SIZE
    assert theirs.memory[:moved] == b"x" * moved
    theirs.close()


def test_a_region_closed_in_the_middle_of_a_copy_fails_it(agent: SharedMemoryAgent, ours: Region) -> None:
    theirs, remote = allocate(SIZE), agent.load_remote(agent.metadata())
    request = many_pieces(remote, ours, exported(agent, theirs))
    carried_out(agent, request, theirs.close)
    assert isinstance(request.error, StaleHandle)


def test_an_interrupted_caller_ends_its_request(agent: SharedMemoryAgent, ours: Region) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    theirs, remote = allocate(SIZE), agent.load_remote(agent.metadata())
    request = many_pieces(remote, ours, exported(agent, theirs))
    with pytest.raises(KeyboardInterrupt):
        carried_out(agent, request, interrupt)
    assert isinstance(request.error, Closed)
    theirs.close()


# --- notifications ---


# --- peers that the tests play: honest ones, and those that do not keep to the protocol ---


class Impostor:
    """Listens like an owner and sends scripted replies, one connection after another."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.host_id = socket_id(str(path))
        self.metadata = MAGIC + self.host_id.encode() + b" " + str(path).encode()
        self._thread: threading.Thread | None = None

    def answers(self, *answers: tuple[Message, list[int]]) -> None:
        """Welcome the next peer and answer its further requests so: (message, descriptors, which are closed then)."""

        def serve() -> None:
            sock, _ = self._listener.accept()
            with sock:
                sock.settimeout(10)
                for message, fds in [(Welcome(SERVER_AGENT, "impostor", host_id=self.host_id), list[int]()), *answers]:
                    header = unpack_header(read_exactly(sock, HEADER_BYTES))
                    read_exactly(sock, header.body_bytes)
                    socket.send_fds(sock, [frame(message, header.request_id)], fds)
                    for fd in fds:
                        os.close(fd)
                with suppress(ConnectionError):
                    sock.recv(1)

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(10)
            assert not self._thread.is_alive()
        self._listener.close()


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Impostor]:
    impostor = Impostor(tmp_path / "peer.sock")
    yield impostor
    impostor.close()


def memfd(size_bytes: int) -> int:
    fd = os.memfd_create("impostor", os.MFD_CLOEXEC)
    os.truncate(fd, size_bytes)
    return fd


def table_with(region_id: int) -> tuple[Message, list[int]]:
    fd = memfd(16)
    os.pwrite(fd, region_id.to_bytes(8, "little"), 8)
    return MapSlabsReply([16]), [fd]


REMOTE = RemoteRegion(5, SIZE, 1, {"shm": b"\1\0\0\0"})
LIES: list[tuple[Callable[[], tuple[Message, list[int]]], type[KVStoreError]]] = [
    (lambda: (MapSlabsReply([SIZE]), [memfd(SIZE - 1)]), Unreachable),
    (lambda: (MapSlabsReply([1 << 62]), [memfd(SIZE)]), Unreachable),
    (lambda: (MapSlabsReply([SIZE - 1]), [memfd(SIZE)]), InvalidArgument),
    (lambda: (MapSlabsReply([SIZE, SIZE]), [memfd(SIZE), memfd(SIZE)]), ProtocolError),
    (lambda: (MapSlabsReply([0, SIZE]), [memfd(SIZE)]), ProtocolError),
    (lambda: (MapSlabsReply([0]), []), ProtocolError),
    (lambda: (MapSlabsReply([]), []), ProtocolError),
    (lambda: (MapSlabsReply([SIZE]), []), ProtocolError),
    (lambda: (MapSlabsReply([SIZE]), [memfd(SIZE), memfd(SIZE)]), ProtocolError),
    (lambda: (Ok(), []), ProtocolError),
]


@pytest.mark.parametrize(("lie", "error"), LIES, ids=range(len(LIES)))
def test_a_peer_with_false_region_data_is_detected(
    agent: SharedMemoryAgent, impostor: Impostor, ours: Region, lie: Callable[[], tuple[Message, list[int]]], error: type[KVStoreError]
) -> None:
    remote, before = agent.load_remote(impostor.metadata), descriptors()
    impostor.answers(table_with(5), lie())
    with pytest.raises(error):
        read(agent, remote, ours, REMOTE)
    agent.unload_remote(remote)
    eventually(lambda: descriptors() == before, "every descriptor is closed")


@pytest.mark.parametrize("size_bytes", [1, 15, 17])
def test_a_table_of_another_form_is_refused_and_asked_for_again(
    agent: SharedMemoryAgent, impostor: Impostor, ours: Region, size_bytes: int
) -> None:
    remote = agent.load_remote(impostor.metadata)
    impostor.answers((MapSlabsReply([size_bytes]), [memfd(17)]))
    with pytest.raises(ProtocolError, match=f"has {size_bytes} bytes"):
        read(agent, remote, ours, REMOTE)
    impostor.answers(table_with(5), (MapSlabsReply([SIZE]), [memfd(SIZE)]))
    read(agent, remote, ours, REMOTE)
    agent.unload_remote(remote)
