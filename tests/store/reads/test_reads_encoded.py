"""Tests of reads of values that NVMe holds encoded, over real sockets: read_service.py, mover.py, replica_fetch.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ChecksumMismatch
from kvstore.protocol.node_messages import INLINE, MAPPED, MISS
from kvstore.protocol.session_messages import ROLE_NODE, Hello
from kvstore.rpc.address import socket_id
from kvstore.rpc.deadline import Deadline
from kvstore.store.block_table.block import NVME, Block
from kvstore.store.replication.replica_fetch import ReplicaBlock, SourceNode, fetch
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.placements import PAGE_BYTES
from tests.store.served import TIMEOUT_S, Client, Served, digest, served
from tests.store.tensors import after, tensor_value

VALUES = {name: tensor_value(seed) for seed, name in enumerate("abcd")}
LOSSY = {name: after("fp8-head", value) for name, value in VALUES.items()}
PLAIN = b"not a tensor" * 100


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=1 << 20, nvme_bytes=1 << 20, codec="fp8-head") as node:
        yield node


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect()
    client.put({**VALUES, "plain": PLAIN})
    yield client
    client.close()


def block_of(node: Served, name: str) -> Block:
    block = node.call(lambda: node.store.table.find("red", name.encode()))
    assert block is not None
    return block


def nvme_of(node: Served) -> NvmeTier:
    nvme = node.store.tiers[NVME]
    assert isinstance(nvme, NvmeTier)
    return nvme


@pytest.mark.parametrize("tcp", [False, True])
def test_decoded_values_have_one_checksum_at_each_read(node: Served, tcp: bool) -> None:
    """The first read is sent, the second promotes, the third finds it in DRAM. The client verifies each checksum."""
    client = node.connect(tcp=tcp)
    client.put({**VALUES, "plain": PLAIN})
    node.demote(*VALUES, "plain")
    for tier in (4, 4, 2):
        blocks, values = client.read(*VALUES, "plain")
        assert values == [*LOSSY.values(), PLAIN]
        assert list(blocks.tiers) == [tier] * 5
        assert list(blocks.sizes) == [*map(len, VALUES.values()), len(PLAIN)]
        client.release(blocks.lease)
    assert set(blocks.statuses) == {INLINE if tcp else MAPPED}
    node.demote("a")
    assert client.read("a", generations=[1])[1] == [LOSSY["a"]]
    assert block_of(node, "a").checksum == digest(VALUES["a"])
    client.close()


@pytest.mark.promise("codec-bounded")
def test_damaged_encoded_bytes_are_a_miss_and_dropped(node: Served, client: Client, tmp_path: Path) -> None:
    node.demote("a", "b")
    slot = block_of(node, "a").nvme
    assert slot is not None
    placement = nvme_of(node)._values.placements.find(slot.index)
    assert placement is not None
    with (tmp_path / "nvme" / "values").open("r+b") as file:
        file.seek(placement.runs[0].begin * PAGE_BYTES)
        file.write(bytes(slot.size_bytes))
    blocks, values = client.read("a", "b")
    assert values == [None, LOSSY["b"]]
    assert list(blocks.statuses) == [MISS, MAPPED]
    assert node.call(lambda: node.store.table.find("red", b"a")) is None
    assert node.store.table.corrupt_reads == 1


@pytest.mark.promise("codec-bounded")
def test_a_value_that_decodes_differently_is_a_miss(node: Served, client: Client) -> None:
    """As with another release of torch, which rounds differently."""
    node.demote("a")
    block = block_of(node, "a")
    loss = block.loss_in(NVME)
    assert loss is not None
    node.call(lambda: block.set_loss(NVME, loss._replace(checksum=loss.checksum ^ 1)))
    assert client.read("a")[1] == [None]
    assert node.call(lambda: node.store.table.find("red", b"a")) is None


# --- for another node ---


def wanted(name: str, value: bytes, checksum: int | None = None) -> tuple[bytearray, ReplicaBlock]:
    room = bytearray(len(value))
    return room, ReplicaBlock(name.encode(), 1, digest(value) if checksum is None else checksum, memoryview(room))


def ask(node: Served, *wants: ReplicaBlock) -> list[Any]:
    return fetch(
        SourceNode(5, socket_id(node.unix), node.unix, node.tcp), Hello(ROLE_NODE, "red", name="asker"), wants, Deadline(TIMEOUT_S)
    )


def test_a_lossy_tensor_is_copied_with_its_checksum(node: Served, client: Client) -> None:
    node.demote("a")
    (room_a, a), (room_b, b) = wanted("a", VALUES["a"]), wanted("b", VALUES["b"])
    assert ask(node, a, b) == [digest(LOSSY["a"]), digest(VALUES["b"])]
    assert [bytes(room_a), bytes(room_b)] == [LOSSY["a"], VALUES["b"]]


@pytest.mark.promise("codec-bounded")
def test_only_raw_tensors_may_have_another_checksum(node: Served, client: Client) -> None:
    (answer,) = ask(node, wanted("plain", PLAIN, checksum=7)[1])
    assert isinstance(answer, ChecksumMismatch)


def test_a_damaged_tensor_is_not_taken_for_a_lossy_one(node: Served, client: Client) -> None:
    """The source reports one checksum and sends bytes with another."""
    block = block_of(node, "b")
    node.call(lambda: setattr(block, "checksum", block.checksum ^ 1))
    (answer,) = ask(node, wanted("b", VALUES["b"], checksum=99)[1])
    assert isinstance(answer, ChecksumMismatch)
