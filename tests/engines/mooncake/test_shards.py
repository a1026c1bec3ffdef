"""Tensors that are cut for ranks are read by each rank as its shard."""

import torch

from kvstore.engines.mooncake.config import ReplicateConfig
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from tests.engines.mooncake.memory import Room
from tests.engines.mooncake.test_tensors import same


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
