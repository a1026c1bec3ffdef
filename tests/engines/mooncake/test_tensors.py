"""Tensors are read as they were put, and have Mooncake's binary form.

Tensors that are cut for ranks are read by each rank as its shard.
"""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.engines.mooncake.arguments import ReplicateConfig
from kvstore.engines.mooncake.store import MooncakeDistributedStore, _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from kvstore.engines.mooncake.tensor_values import DTYPES, parsed
from tests.engines.mooncake.memory import Room

TENSORS = [
    torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    torch.arange(24).reshape(4, 6).t(),
    torch.ones(5, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(7.5, dtype=torch.float64),
    torch.empty((2, 0, 3), dtype=torch.float16),
]


def same(one: Any, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_tensors_are_got_as_they_were_put(store: MooncakeDistributedStore, tensor: torch.Tensor) -> None:
    assert store.put_tensor("key", tensor) == 0
    assert same(store.get_tensor("key"), tensor)
    size = store.get_size("key")
    room = Room(size + 100)
    assert same(store.get_tensor_into("key", room.at, size + 100), tensor)
    assert store.put_tensor_from("again", room.at, size + 100) == -600
    assert store.put_tensor_from("again", room.at, size) == 0
    assert same(store.get_tensor("again"), tensor)
    assert store.upsert_tensor_from("key", room.at, size) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_that_has_a_number_is_one_of_torchs(store: MooncakeDistributedStore, name: str) -> None:
    tensor = torch.arange(4).to(getattr(torch, name))
    assert store.put_tensor("key", tensor) == 0
    found = store.get_tensor("key")
    assert found.dtype == tensor.dtype
    assert bytes(found.view(torch.uint8).numpy()) == bytes(tensor.view(torch.uint8).numpy())


def test_a_tensor_is_the_callers_own(store: MooncakeDistributedStore) -> None:
    store.put_tensor("key", torch.zeros(1000))
    store.get_tensor("key").fill_(1)
    assert same(store.get_tensor("key"), torch.zeros(1000))


def test_batches_and_replacements(store: MooncakeDistributedStore) -> None:
    keys = [str(i) for i in range(len(TENSORS))]
    assert store.batch_put_tensor(keys, TENSORS) == [0] * len(keys)
    assert all(map(same, store.batch_get_tensor(keys), TENSORS))
    room = Room(4096)
    [into] = store.batch_get_tensor_into(["0"], [room.at], [4096])
    assert same(into, TENSORS[0])
    assert store.batch_get_tensor_into(["0", "1"], [room.at], [4096]) == [-600, -600]
    assert store.batch_get_tensor_into(["nowhere"], [room.at], [4096]) == [None]
    assert store.batch_upsert_tensor(["0"], [TENSORS[0] + 1]) == [0]
    assert (store.upsert_tensor("1", TENSORS[0]), store.upsert_pub_tensor("2", TENSORS[0]), store.pub_tensor("new", TENSORS[0])) == (
        0,
        0,
        0,
    )
    assert same(store.get_tensor("0"), TENSORS[0] + 1)
    assert same(store.get_tensor("1"), TENSORS[0])
    assert store.batch_put_tensor_from(["x", "y"], [room.at], [1]) == [-600, -600]


def test_what_is_no_tensor_is_refused_and_never_read_as_one(store: MooncakeDistributedStore) -> None:
    room = Room(200)
    for value in ("text", torch.eye(2).to_sparse()):
        assert store.put_tensor("key", value) == -600
    assert store.batch_put_tensor_from(["a", "b", "c"], [room.at, room.at, 0], [200, 10, 10]) == [-600] * 3
    store.put_batch(["short", "other"], [b"x", bytes(500)])
    assert (store.get_tensor("short"), store.get_tensor("other"), store.get_tensor("nowhere")) == (None, None, None)
    assert store.get_tensor_into("nowhere", room.at, 200) is None


def test_header_is_mooncakes(store: MooncakeDistributedStore) -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    header, pointer, size, owner = _serialize_tensor(tensor)
    assert (len(header), _tensor_metadata_size(), size, pointer) == (304, 304, 12, owner.data_ptr())
    assert same(_deserialize_tensor(header + tensor.numpy().tobytes()), tensor)
    store.put("raw", header + tensor.numpy().tobytes())
    assert same(store.get_tensor("raw"), tensor)
    for unfit in (torch.ones(2, dtype=torch.complex64), torch.ones([1] * 9), torch.ones(2, device="meta"), "text"):
        with pytest.raises(ValueError, match="unsupported"):
            _serialize_tensor(unfit)
    with pytest.raises(ValueError, match="invalid"):
        _deserialize_tensor(b"x" * 400)


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0), (4, 2), (6, 0), (8, 99), (12, 9), (16, 2), (24, 0), (32, 1), (40, -1), (104, -1), (168, 5), (120, 0)]
)
def test_header_of_other_values_is_none(at: int, value: int) -> None:
    header = bytearray(_serialize_tensor(torch.ones((2, 1), dtype=torch.uint8))[0])
    assert parsed(memoryview(header + b"xx")) is not None
    struct.pack_into("<q" if at >= 24 and at != 168 else "<h" if at in (4, 6) else "<i", header, at, value)
    assert parsed(memoryview(header + b"xx")) is None


def test_cuda_reads_are_refused(store: MooncakeDistributedStore) -> None:
    """Mooncake does them through a client process of the host, which has no counterpart here."""
    assert store.get_tensor_into_cuda("key", torch.ones(1)) == -600
    assert store.batch_get_tensor_into_cuda(["key", "other"], [torch.ones(1)]) == [-600, -600]


def test_published_tensors_have_a_segment_a_replica(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig()
    config.preferred_segments = ["a", "b"]
    assert store.pub_tensor("key", TENSORS[0], config) == -600


def test_files_of_tensors(store: MooncakeDistributedStore, tmp_path: Path) -> None:
    path = str(tmp_path / "file.safetensors")
    store.put_tensor("key", TENSORS[0])
    assert store.save_tensor_to_safetensor("key", path) == 0
    assert store.save_tensor_to_safetensor("nowhere", path) == -1100
    store.remove("key", force=True)
    assert same(store.load_tensor_from_safetensor("key", path), TENSORS[0])
    assert same(store.get_tensor("key"), TENSORS[0])
    assert same(store.load_tensor_from_safetensor("another name", path), TENSORS[0])
    assert same(store.load_tensor_from_safetensor(None, path), TENSORS[0])
    assert same(store.get_tensor(path), TENSORS[0])
    assert store.load_tensor_from_safetensor("key", path + "x") is None


def test_shards_are_those_of_the_ranks(store: MooncakeDistributedStore) -> None:
    tensor = torch.arange(24).reshape(4, 6)
    assert store.put_tensor_with_tp("key", tensor, tp_size=2, split_dim=1) == 0
    shards = [store.get_tensor_with_tp("key", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(shards, 1), tensor)
    assert same(store.batch_get_tensor_with_tp(["key"], 1, 2)[0], tensor[:, 3:].contiguous())
    assert same(store.get_tensor("key_tp_0"), tensor[:, :3].contiguous())
    assert store.batch_put_tensor_with_tp(["whole"], [tensor]) == [0]
    assert same(store.get_tensor_with_tp("whole"), tensor)
    assert store.put_tensor_with_tp("few", torch.ones(1), tp_size=2) == -600
    assert store.put_tensor_with_tp("none", torch.tensor(1), tp_size=2) == -600
    assert store.pub_tensor_with_tp("pub", tensor, tp_size=4) == 0
    assert store.put_tensor_with_tp("other", "text", tp_size=2) == -600
    for dimension in (-1, 2, 5):
        assert store.put_tensor_with_tp("other", tensor, tp_size=2, split_dim=dimension) == -600
    assert store.put_tensor_with_tp("unequal", tensor, tp_size=3) == -600
    assert store.put_tensor_with_tp("unknown", tensor.to(torch.complex64), tp_size=2) == -600


def test_shards_of_a_batch_are_each_tensor_s(store: MooncakeDistributedStore) -> None:
    tensors, config = [torch.arange(8).reshape(4, 2), torch.arange(2)], ReplicateConfig()
    assert store.batch_put_tensor_with_tp(["a", "b"], [*tensors, None], tp_size=2) == [-600, -600]
    config.group_ids, config.with_hard_pin = ["g", "h"], True
    assert store.batch_pub_tensor_with_tp(["a", "b"], tensors, config, tp_size=2) == [0, 0]
    assert store.remove("a_tp_0") == -706
    assert same(store.get_tensor("b_tp_1"), torch.tensor([1]))
    config.group_ids = ["g"]
    assert store.batch_pub_tensor_with_tp(["a", "b"], tensors, config, tp_size=2) == [-600, -600]


def test_shards_go_from_memory_and_to_memory(store: MooncakeDistributedStore) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    store.put_tensor("key", tensor)
    size = store.get_size("key")
    room, into = Room(size), Room(4096)
    assert same(store.get_tensor_with_tp_into("key", room.at, size), tensor)
    assert store.put_tensor_with_tp_from("cut", room.at, size, tp_size=2, split_dim=1) == 0
    assert same(store.get_tensor_with_tp_into("cut", into.at, 4096, 1, 2, 1), tensor[:, 3:].contiguous())
    assert store.batch_put_tensor_with_tp_from(["a", "b"], [room.at, 0], [size, size], 0, 2, 0) == [0, -600]
    assert store.batch_put_tensor_with_tp_from(["a"], [room.at], [], 0, 2, 0) == [-600]
    assert store.batch_put_tensor_with_tp_from(["whole"], [room.at], [size]) == [0]
    found, none = store.batch_get_tensor_with_tp_into(["a", "b"], [room.at, into.at], [size, 4096], 1, 2)
    assert none is None
    assert same(found, tensor[2:].contiguous())
    assert store.batch_get_tensor_with_tp_into(["a"], [0], [size], 1, 2) == [-600]
    assert MooncakeDistributedStore().batch_get_tensor_with_tp_into(["a"], [room.at], [size]) == [None]
