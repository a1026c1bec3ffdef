"""Fixtures of the agents' conformance suite: a pair of agents, counted requests, marked memory, and an agent in another
process.
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
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from kvstore.transfer.agent import AgentRequest, Direction, Remote, TransferAgent
from kvstore.transfer.memory.pieces import Pieces
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion

MARK: Final = b"\xee" * 4096
"""Written over memory that no transfer may touch any more; longer than any repetition in a pattern."""


class RegionAllocator:
    """Allocates regions that are memfds, like a node's slabs. A context manager: closes them, after the agents that use
    them.
    """

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def allocate(self, size_bytes: int, data: bytes = b"") -> Region:
        """Return a region of zeros, or of `data`."""
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
    """Return the region as its owner describes it to peers that may read and write it."""
    descriptor = owner.export(region)
    assert descriptor is not None, "an agent reaches every region of shared memory"
    return RemoteRegion(region.region_id, region.size_bytes, region.write_key, {owner.transport: descriptor}, region.location)


def pattern(seed: int, size_bytes: int) -> bytes:
    """Return bytes of which each aligned group of eight is unique, also among seeds below 2**32. A tenth of the cost of
    random bytes, of which two processes make 32 MiB each per peer.

    Source: SplitMix64's step, and part of its mixing (Steele, Lea and Flood, OOPSLA 2014).
    """
    words = np.arange(1, size_bytes // 8 + 2, dtype=np.uint64)  # 0 is mixed to 0, like unwritten memory
    words += np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[:size_bytes].tobytes()


class PeerProcess:
    """An agent in another process that serves one region. A context manager that kills it.

    `metadata` is the agent's; `region` its region, initially `content`.
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
        """Stop the process (SIGSTOP) for the time of the block."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, as in a crash."""
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
    """Main function of the peer's process: `FILE CLASS REGION_BYTES`. Prints its description and serves until killed."""
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
    """Return the class of this name in a file that need not be importable."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class AgentPair:
    """The agent `owner`, whose regions are accessed, and the agent `user`, which accesses them and knows the owner as
    `remote`.
    """

    def __init__(self, owner: TransferAgent, user: TransferAgent, memory: RegionAllocator) -> None:
        self.owner, self.user, self.memory = owner, user, memory
        self.remote = user.load_remote(owner.metadata())

    def regions(self, size_bytes: int) -> tuple[Region, Region, RemoteRegion]:
        """Return (the owner's region, with pattern 1; the user's, with pattern 2; the owner's as the user knows it)."""
        theirs, ours = (self.memory.allocate(size_bytes, pattern(seed, size_bytes)) for seed in (1, 2))
        return theirs, ours, remote_region(self.owner, theirs)

    def move(self, direction: Direction, *pieces: Piece) -> None:
        """Submit and wait. Raises the request's error."""
        move(self.user, direction, self.remote, pieces)

    def failure(self, direction: Direction, *pieces: Piece) -> KVStoreError | None:
        """Return the request's error, or None."""
        return outcome(ask(self.user, direction, self.remote, pieces))


class CountedRequest(AgentRequest):
    """Counts the calls of `finish`."""

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
    """Submit, run and wait. Raises the request's error."""
    request = ask(agent, direction, remote, pieces, timeout_s=timeout_s)
    agent.run(request)
    request.wait(Deadline(PATIENCE_S))


def outcome(request: AgentRequest) -> KVStoreError | None:
    """Wait for the request and return its error, or None."""
    with suppress(KVStoreError):
        request.wait(Deadline(PATIENCE_S))
    assert request.is_over, "the request never ended"
    return request.error


def whole(pair: AgentPair, peer: PeerProcess) -> tuple[Region, list[Piece]]:
    """Make the peer the pair's owner. Returns a region of the user's, and the piece that covers the peer's region."""
    pair.remote = pair.user.load_remote(peer.metadata)
    ours = pair.memory.allocate(peer.region.size_bytes)
    return ours, [Piece(ours, 0, peer.region, 0, peer.region.size_bytes)]


def overwrite(region: Region) -> None:
    region.memory[:] = MARK * (region.size_bytes // len(MARK))


def is_overwritten(region: Region) -> bool:
    return region.memory == MARK * (region.size_bytes // len(MARK))


def notifications(agent: TransferAgent, count: int) -> list[tuple[str, bytes]]:
    """Return `count` notifications."""
    found: list[tuple[str, bytes]] = []

    def is_enough() -> bool:
        found.extend(agent.notifications())
        return len(found) >= count

    eventually(is_enough, f"{count} notifications")
    return found
