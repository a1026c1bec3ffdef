"""Slabs of nodes on the same host, mapped from a scripted cluster."""

import os

import pytest

from kvstore.client.core import effects
from kvstore.protocol.errors import StaleHandle
from tests.client.oracle import Oracle, OracleChannel, OracleNode


def channel_to(oracle: Oracle, node: OracleNode) -> OracleChannel:
    from kvstore.rpc.address import Address

    return OracleChannel(Address(unix=node.unix), oracle._welcome(Address(unix=node.unix)))


def test_freed_slab_is_a_stale_handle(oracle: Oracle, node: OracleNode) -> None:
    with pytest.raises(StaleHandle):
        oracle.run(oracle.resources.mapping.map_slabs(channel_to(oracle, node), 1, [9, 1], oracle.deadline(), writable=False))
    assert len(oracle.resources.mapping.slabs) == 1


def test_a_slab_that_is_being_mapped_is_waited_for(oracle: Oracle, node: OracleNode) -> None:
    channel, slabs = channel_to(oracle, node), oracle.resources.mapping.slabs
    oracle.run(oracle.resources.mapping.map_ahead(channel, 1, [1], oracle.deadline()))
    [map_announced] = oracle.aside
    begun = slabs._next_announced()  # as the thread does
    assert begun is not None
    mapping = oracle.resources.mapping.map_slabs(channel, 1, [1], oracle.deadline(), writable=True)
    wait = next(mapping)
    slabs._map(begun)
    oracle._do(wait)
    oracle.run(map_announced)
    with pytest.raises(StopIteration) as end:
        mapping.send(None)
    assert len(end.value.value) == 1
    assert len(oracle.log) == 1


def test_announced_slab_is_mapped_by_its_user(oracle: Oracle, node: OracleNode) -> None:
    channel, mapping = channel_to(oracle, node), oracle.resources.mapping
    oracle.run(mapping.map_ahead(channel, 1, [1, 2], oracle.deadline()))
    assert len(oracle.run(mapping.map_slabs(channel, 1, [2], oracle.deadline(), writable=True))) == 1
    [map_announced] = oracle.aside
    oracle.run(map_announced)
    assert len(oracle.run(mapping.map_slabs(channel, 1, [1, 2], oracle.deadline(), writable=True))) == 2
    assert len(oracle.log) == 1, "the node was asked for both once"


def test_slabs_are_mapped_on_use_without_a_thread(oracle: Oracle, node: OracleNode) -> None:
    channel, mapping = channel_to(oracle, node), oracle.resources.mapping
    fds = os.listdir("/proc/self/fd")
    oracle.script[effects.SpawnEffect].append(RuntimeError("can't start new thread"))
    oracle.run(mapping.map_ahead(channel, 1, [1], oracle.deadline()))
    assert os.listdir("/proc/self/fd") == fds
    assert len(oracle.run(mapping.map_slabs(channel, 1, [1], oracle.deadline(), writable=True))) == 1
    assert len(oracle.log) == 2


def test_what_ends_before_slabs_are_mapped_leaves_no_descriptor(oracle: Oracle, node: OracleNode) -> None:
    fds = os.listdir("/proc/self/fd")
    mapping = oracle.resources.mapping.map_slabs(channel_to(oracle, node), 1, [1, 2], oracle.deadline(), writable=False)
    work = mapping.send(oracle._do(next(mapping)))
    assert isinstance(work, effects.RunInThreadEffect)
    assert len(os.listdir("/proc/self/fd")) == len(fds) + 2
    with pytest.raises(KeyboardInterrupt):
        mapping.throw(KeyboardInterrupt())
    assert os.listdir("/proc/self/fd") == fds
    work.function()  # one that comes too late all the same finds none
    assert len(oracle.resources.mapping.slabs) == 0
