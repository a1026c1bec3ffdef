"""Scene of the conformance suite of agents: two agents, counted requests, marked memory, and an agent in another process, to be stopped and
killed.
"""

import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.waiting import PATIENCE_S, eventually
from kvstore.transfer.agent import AgentRequest, Direction, Remote, TransferAgent
from kvstore.transfer.memory.pieces import Pieces
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion

MARK: Final = b"\xee" * 4096
"""Written over memory that no transfer may touch any more; long enough that no pattern has it."""


class RegionAllocator:
    """Makes regions that are each a memfd, as a node's slabs are. A context manager: closes them all, after the agents that use them."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def allocate(self, size_bytes: int, data: bytes = b"") -> Region:
        """A region of zeros, or of `data`."""
        fd = os.memfd_create("conformance", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        region = Region(memoryview(mmap.mmap(fd, size_bytes)), location="cpu:0", fd=fd)
        region.memory[: len(data)] = data
        self._regions.append(region)
        return region

    def __enter__(self) -> "RegionAllocator":
        return self

    def __exit__(self, *error: object) -> None:
        for region in self._regions:
            region.close()
            os.close(region.fd)


def remote_region(owner: TransferAgent, region: Region) -> RemoteRegion:
    """The region as its owner describes it to peers that may read and write it."""
    descriptor = owner.export(region)
    assert descriptor is not None, "an agent reaches every region of shared memory"
    return RemoteRegion(region.region_id, region.size_bytes, region.write_key, {owner.transport: descriptor}, region.location)


def pattern(seed: int, size_bytes: int) -> bytes:
    """Bytes of which each eight that begin at a multiple of eight are nowhere else, nor in those of another seed, which is less than
    2**32. A tenth of what random ones cost, of which two processes make 32 MiB each for every peer.

    Source: SplitMix64's step, and a part of what it mixes (Steele, Lea and Flood, OOPSLA 2014).
    """
    words = np.arange(1, size_bytes // 8 + 2, dtype=np.uint64)  # 0 is mixed to 0, as what nobody wrote is
    words += np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[:size_bytes].tobytes()


class PeerProcess:
    """An agent in a process of its own that serves one region. A context manager: it is gone at the end.

    `metadata` is the agent's; `region` its region, which held `content` at the start.
    """

    def __init__(self, suite: type, *, region_bytes: int) -> None:
        """`suite` is a test class at the top level of its file, with a `make_agent(name)` that needs no fixture."""
        source = sys.modules[suite.__module__].__file__
        command = [sys.executable, "-c", "from kvstore.testing.transfer.peer import serve; serve()", str(source), suite.__qualname__]
        paths = os.pathsep.join([os.getcwd(), *sys.path])
        self._process = subprocess.Popen(
            [*command, str(region_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        assert self._process.stdout is not None
        description = json.loads(self._process.stdout.readline() or "null")
        assert description is not None, "the process of the peer failed: see its standard error"
        self.metadata = bytes.fromhex(description["metadata"])
        descriptors = {transport: bytes.fromhex(text) for transport, text in description["descriptors"].items()}
        self.region = RemoteRegion(description["region_id"], region_bytes, description["key"], descriptors)
        self.content = pattern(0, region_bytes)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does not run in between."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It ends at once, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def serve() -> None:
    """The peer's process: `FILE CLASS REGION_BYTES`. Tells how it is reached on standard output and serves until it is killed."""
    source, suite, region_bytes = sys.argv[1:]
    with ExitStack() as stack:
        memory = stack.enter_context(RegionAllocator())
        agent: TransferAgent = load(Path(source), suite)().make_agent("peer")
        stack.callback(agent.close)
        region = memory.allocate(int(region_bytes), pattern(0, int(region_bytes)))
        remote = remote_region(agent, region)
        descriptors = {transport: descriptor.hex() for transport, descriptor in remote.descriptors.items()}
        description = {"metadata": agent.metadata().hex(), "region_id": remote.region_id, "key": remote.key, "descriptors": descriptors}
        print(json.dumps(description), flush=True)
        sys.stdin.read()  # ends with the process that started this one


def load(source: Path, name: str) -> Any:
    """The class of this name in a file, which need not be importable by a name of its own."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class AgentPair:
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
        move(self.user, direction, self.remote, pieces)

    def failure(self, direction: Direction, *pieces: Piece) -> KVStoreError | None:
        """What the request fails with; None when it succeeds."""
        return outcome(ask(self.user, direction, self.remote, pieces))


class CountedRequest(AgentRequest):
    """Counts how often its agent says that it is over."""

    finish_count = 0

    def finish(self, error: KVStoreError | None = None) -> None:
        self.finish_count += 1
        super().finish(error)


def ask(agent: TransferAgent, direction: Direction, remote: Remote, pieces: Pieces, *, timeout_s: float = PATIENCE_S) -> CountedRequest:
    """Submit as the engine does: the regions are held until the request is over."""

    def release(request: AgentRequest) -> None:
        for piece in request.pieces:
            piece.local.release()

    for piece in pieces:
        piece.local.hold()
    request = CountedRequest(direction, remote, pieces, Deadline(timeout_s), callback=release)
    agent.submit(request)
    return request


def move(agent: TransferAgent, direction: Direction, remote: Remote, pieces: Pieces, *, timeout_s: float = PATIENCE_S) -> None:
    """Submit, help and wait. Raises what the request failed with."""
    request = ask(agent, direction, remote, pieces, timeout_s=timeout_s)
    agent.run(request)
    request.wait(Deadline(PATIENCE_S))


def outcome(request: AgentRequest) -> KVStoreError | None:
    """Wait until it is over: what it failed with, or None."""
    with suppress(KVStoreError):
        request.wait(Deadline(PATIENCE_S))
    assert request.is_over, "the request never ended"
    return request.error


def whole(pair: AgentPair, peer: PeerProcess) -> tuple[Region, list[Piece]]:
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
