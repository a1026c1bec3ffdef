"""A thousand peers through 64 endpoints, over real sockets: never more open, none leaked, and those kept are the ones that SIEVE keeps."""

import os
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import pytest

from kvstore.testing.transfer.awaited import eventually, in_background
from kvstore.testing.transfer.peer import move
from kvstore.transfer.agent import Direction, Remote
from kvstore.transfer.memory.region import Piece, Region
from kvstore.transfer.streams.agent import ConnectionAgent
from tests.rpc.raw_peers import AGENT_MAGIC, PATIENCE_S, an_agent, make_region
from tests.transfer.streams.many_targets import REGION_BYTES, ManyTargets, many_targets

PEERS = 1000
ENDPOINTS = 64
THREADS = 8
OTHERS = 4
"""Descriptors for other threads of this process: a master that a fixture of the session keeps looks at its own now and then."""
EXPONENT = 1.0
"""Of the Zipf distribution: the peer of rank r gets requests in proportion to 1 / r."""


@pytest.fixture(scope="module")
def peers() -> Iterator[ManyTargets]:
    with many_targets(PEERS) as peers:
        yield peers


def small_pool() -> AbstractContextManager[ConnectionAgent]:
    # Eight threads of one process read from as many of another: on a busy machine half a second may pass without a byte.
    return an_agent(max_endpoints=ENDPOINTS, tcp_streams=1, listens=False, stall_timeout_s=PATIENCE_S)


def load(agent: ConnectionAgent, peers: ManyTargets) -> list[Remote]:
    return [agent.load_remote(AGENT_MAGIC + metadata) for metadata in peers.metadata]


def zipf(count: int, seed: int) -> list[int]:
    """Peers by number; which of them are popular has nothing to do with their order."""
    random = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, PEERS + 1) ** EXPONENT
    return [int(number) for number in np.random.default_rng(0).permutation(PEERS)[random.choice(PEERS, count, p=weights / weights.sum())]]


def descriptors() -> list[int]:
    """Of this process, without the one that lists them."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """The kernel gives this process so many descriptors more and not one beyond."""
    used, limit = set(descriptors()), 0
    while limit - sum(number < limit for number in used) < count:
        limit += 1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def read_from(agent: ConnectionAgent, remote: Remote, peers: ManyTargets, ours: Region) -> None:
    ours.memory[:] = bytes(REGION_BYTES)
    move(agent, Direction.READ, remote, [Piece(ours, 0, peers.region, 0, REGION_BYTES)])
    assert ours.memory == b"\1" * REGION_BYTES


def test_open_connections_stay_within_the_limit(peers: ManyTargets) -> None:
    before = len(descriptors())
    most_here, most_there = [0] * THREADS, 0
    with small_pool() as agent:
        remotes = load(agent, peers)
        read_from(agent, remotes[0], peers, make_region(REGION_BYTES))  # imports what connecting needs

        def ask(thread: int, sequence: Sequence[int]) -> None:
            ours = make_region(REGION_BYTES)
            for number in sequence:
                read_from(agent, remotes[number], peers, ours)
                most_here[thread] = max(most_here[thread], agent._pool.open_count)

        with room_for(ENDPOINTS - 1 + OTHERS):
            asking = [in_background(partial(ask, thread, zipf(400, thread))) for thread in range(THREADS)]
            while wait(asking, timeout=0.01).not_done:
                most_there = max(most_there, peers.connections)
            for future in asking:
                future.result(PATIENCE_S)
        assert max(most_here) == ENDPOINTS
        # A connection that is closed here is known there until its end is read.
        assert ENDPOINTS // 2 < most_there <= ENDPOINTS + THREADS
        eventually(lambda: peers.connections == agent._pool.open_count, "the peers know of those that are open")
        agent._pool.check_integrity()
    assert len(descriptors()) == before
    eventually(lambda: peers.connections == 0, "the peers have none either")
