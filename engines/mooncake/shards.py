"""Calls for tensor parallelism: a tensor is cut for ranks, and each rank reads its shard.

Shard i is the object `KEY_tp_i`. Only equal shards are made, as in Mooncake.
"""

from collections.abc import Sequence
from typing import Any

from kvstore.client.memory import view_of
from kvstore.engines.mooncake.arguments import Integer, Number, Numbers, PlainList, Text, Texts
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OK
from kvstore.engines.mooncake.config import ReplicateConfig, has_segments, is_sound
from kvstore.engines.mooncake.puts import DEFAULT, Config
from kvstore.engines.mooncake.tensor_values import ShardOf, decoded, encoded
from kvstore.engines.mooncake.tensors import Tensors, tensor_at


class Shards(Tensors):
    """With a `tp_size` of 1 or less the calls are those for whole tensors."""

    def put_tensor_with_tp(self, key: Text, tensor: Any, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0) -> int:
        """Cut the whole tensor into the shards of all ranks."""
        return self.batch_pub_tensor_with_tp([key], [tensor], DEFAULT, tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self, base_keys: Texts, tensors_list: PlainList, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0
    ) -> list[int]:
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, DEFAULT, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self, key: Text, tensor: Any, config: Config = DEFAULT, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0
    ) -> int:
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Texts,
        tensors_list: PlainList,
        config: Config = DEFAULT,
        tp_rank: Integer = 0,
        tp_size: Integer = 1,
        split_dim: Integer = 0,
    ) -> list[int]:
        """Return a code a tensor: the first of its shards that is no success."""
        if tp_size <= 1:
            return self.batch_pub_tensor(base_keys, tensors_list, config)
        if len(base_keys) != len(tensors_list) or not has_segments(config) or not is_sound(config, len(base_keys)):
            return [INVALID_PARAMS] * len(base_keys)
        config = _without_groups(config)
        return [self._put_shards(key, tensor, config, tp_size, split_dim) for key, tensor in zip(base_keys, tensors_list, strict=True)]

    def put_tensor_with_tp_from(
        self, key: Text, buffer_ptr: Number, size: Number, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0
    ) -> int:
        """Cut a whole tensor that lies in memory as `get_tensor_into` has left it."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Texts,
        buffer_ptrs: Numbers,
        sizes: Numbers,
        tp_rank: Integer = 0,
        tp_size: Integer = 1,
        split_dim: Integer = 0,
    ) -> list[int]:
        if tp_size <= 1:
            return self.batch_put_tensor_from(base_keys, buffer_ptrs, sizes)
        if not len(base_keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(base_keys)
        places = [tensor_at(pointer, size) for pointer, size in zip(buffer_ptrs, sizes, strict=True)]
        tensors = [None if place is None else decoded(view_of(place.pointer, place.size_bytes), copies=False) for place in places]
        return self.batch_pub_tensor_with_tp(base_keys, tensors, DEFAULT, tp_rank, tp_size, split_dim)

    def _put_shards(self, key: str, tensor: Any, config: ReplicateConfig, ranks: int, dimension: int) -> int:
        shards = _shards(tensor, ranks, dimension)
        codes = self._put([_shard(key, rank) for rank in range(ranks)], shards, config) if shards else [INVALID_PARAMS]
        return next((code for code in codes if code != OK), OK)

    # --- reads ---

    def get_tensor_with_tp(self, key: Text, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0) -> Any:
        """Return the rank's shard."""
        return self.get_tensor(key if tp_size <= 1 else _shard(key, tp_rank))

    def batch_get_tensor_with_tp(self, base_keys: Texts, tp_rank: Integer = 0, tp_size: Integer = 1) -> list[Any]:
        return [self.get_tensor_with_tp(key, tp_rank, tp_size) for key in base_keys]

    def get_tensor_with_tp_into(
        self, key: Text, buffer_ptr: Number, size: Number, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0
    ) -> Any:
        """Return the rank's shard in the caller's memory, which must stay as long as it."""
        return self.get_tensor_into(key if tp_size <= 1 else _shard(key, tp_rank), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self, base_keys: Texts, buffer_ptrs: Numbers, sizes: Numbers, tp_rank: Integer = 0, tp_size: Integer = 1
    ) -> list[Any]:
        if self._client is None:
            return [None] * len(base_keys)
        return self.batch_get_tensor_into(base_keys if tp_size <= 1 else [_shard(key, tp_rank) for key in base_keys], buffer_ptrs, sizes)


def _shard(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


def _shards(tensor: Any, ranks: int, dimension: int) -> Sequence[Any]:
    """The objects of all ranks; none for what cannot be cut into equal shards."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not 0 <= dimension < tensor.dim():
        return []
    if tensor.shape[dimension] % ranks:
        return []
    size = tensor.shape[dimension] // ranks
    pieces = [tensor.narrow(dimension, rank * size, size) for rank in range(ranks)]
    found = [encoded(piece, ShardOf(tensor.shape, rank, ranks, dimension)) for rank, piece in enumerate(pieces)]
    return [] if None in found else found


def _without_groups(config: ReplicateConfig) -> ReplicateConfig:
    """Groups change nothing here, but there have to be as many as objects, and a tensor has several."""
    found = ReplicateConfig()
    found.with_hard_pin = config.with_hard_pin
    return found
