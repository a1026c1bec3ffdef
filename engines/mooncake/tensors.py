"""Mooncake's calls that store and read torch tensors, whole or in shards of tensor-parallel ranks.

`Tensors` has the calls for whole tensors: one or many, from and into memory by address, and safetensors files. `Shards`
adds the calls that split a tensor over ranks. Shard i is the object `KEY_tp_i`. Shards are equal in size, as in
Mooncake.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.client import Client, Memory
from kvstore.client.memory import view_of
from kvstore.engines.mooncake.arguments import Integer, Number, Numbers, PlainList, ReplicateConfig, Text, Texts, has_segments, is_sound
from kvstore.engines.mooncake.codes import FILE_NOT_FOUND, INVALID_PARAMS, OK
from kvstore.engines.mooncake.gets import Gets
from kvstore.engines.mooncake.link import memory
from kvstore.engines.mooncake.puts import DEFAULT, Config, Puts
from kvstore.engines.mooncake.tensor_values import HEADER_BYTES, ShardOf, decoded, encoded, parsed

Write = Callable[[Sequence[str], Sequence[Any], ReplicateConfig], list[int]]


class Tensors(Gets, Puts):
    """Calls for whole tensors. The first call imports torch. A tensor that is read is the caller's own, on the CPU;
    None for a miss and for an object that is no tensor."""

    def put_tensor(self, key: Text, tensor: Any) -> int:
        return self.batch_pub_tensor([key], [tensor])[0]

    def batch_put_tensor(self, keys: Texts, tensors_list: PlainList) -> list[int]:
        return self.batch_pub_tensor(keys, tensors_list)

    def pub_tensor(self, key: Text, tensor: Any, config: Config = DEFAULT) -> int:
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_pub_tensor(self, keys: Texts, tensors_list: PlainList, config: Config = DEFAULT) -> list[int]:
        return self._write(self._put, keys, tensors_list, config)

    def upsert_tensor(self, key: Text, tensor: Any) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor])[0]

    def batch_upsert_tensor(self, keys: Texts, tensors_list: PlainList) -> list[int]:
        return self.batch_upsert_pub_tensor(keys, tensors_list)

    def upsert_pub_tensor(self, key: Text, tensor: Any, config: Config = DEFAULT) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_pub_tensor(self, keys: Texts, tensors_list: PlainList, config: Config = DEFAULT) -> list[int]:
        return self._write(self._upsert, keys, tensors_list, config)

    def put_tensor_from(self, key: Text, buffer_ptr: Number, size: Number) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers) -> list[int]:
        """Store memory that `get_tensor_into` filled: header and elements, nothing else. If one is no tensor, none
        is stored."""
        return self._write_from(self._put, keys, buffer_ptrs, sizes)

    def upsert_tensor_from(self, key: Text, buffer_ptr: Number, size: Number) -> int:
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers) -> list[int]:
        return self._write_from(self._upsert, keys, buffer_ptrs, sizes)

    def _write(self, write: Write, keys: Sequence[str], tensors: Sequence[Any], config: ReplicateConfig) -> list[int]:
        if not has_segments(config):
            return [INVALID_PARAMS] * len(keys)
        return write(keys, [encoded(tensor) for tensor in tensors], config)

    def _write_from(self, write: Write, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[int]:
        values = [tensor_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=False)]
        if not len(keys) == len(pointers) == len(sizes) or None in values:
            return [INVALID_PARAMS] * len(keys)
        return write(keys, values, DEFAULT)

    # --- reads ---

    def get_tensor(self, key: Text) -> Any:
        def take(client: Client) -> Any | None:
            with client.view(self._key(key)) as value:
                return None if value is None else decoded(value, copies=True)

        return self._value(take)

    def batch_get_tensor(self, keys: Texts) -> list[Any]:
        return [self.get_tensor(key) for key in keys]

    def get_tensor_into(self, key: Text, buffer_ptr: Number, size: Number) -> Any:
        """Return a tensor in the caller's memory, which must outlive it."""
        found = self.get_into(key, buffer_ptr, size)
        return None if found < 0 else decoded(view_of(buffer_ptr, found), copies=False)

    def batch_get_tensor_into(self, keys: Texts, buffer_ptrs: Numbers, sizes: Numbers) -> list[Any]:
        """Call `get_tensor_into` for each key. Returns -600 for each if the lists differ in length or an address is
        0."""
        if not len(keys) == len(buffer_ptrs) == len(sizes) or not all(buffer_ptrs) or self._client is None:
            return [INVALID_PARAMS] * len(keys)
        found = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [
            None if size < 0 else decoded(view_of(pointer, size), copies=False) for pointer, size in zip(buffer_ptrs, found, strict=True)
        ]

    def get_tensor_into_cuda(self, key: Text, tensor: Any) -> int:
        """Return -600. Mooncake reads into CUDA tensors through its client process on the host, which this store
        does not have. Use `get_tensor` and a copy to the device."""
        return INVALID_PARAMS

    def batch_get_tensor_into_cuda(self, keys: Texts, tensors_list: PlainList) -> list[int]:
        """Return -600 for each key, as `get_tensor_into_cuda`."""
        return [INVALID_PARAMS] * len(keys)

    # --- files ---

    def save_tensor_to_safetensor(self, key: Text, file_name: str | None = None) -> int:
        """Write the tensor to a file, by default named as the key. Needs the package safetensors."""
        if self._client is None:
            return INVALID_PARAMS
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return FILE_NOT_FOUND
        save_file({key: tensor}, file_name or key)
        return OK

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Any | None:
        """Store a tensor of the file: the one with the key's name, else the first. Without a key, the file's name is
        the key.

        Returns the tensor; None if there is no such file or the tensor could not be stored.
        """
        if self._client is None or not Path(file_name).is_file():
            return None
        from safetensors.torch import load_file

        found = load_file(file_name)
        name = key if key is not None else file_name
        tensor = found.get(name, next(iter(found.values()), None))
        return tensor if tensor is not None and self.put_tensor(name, tensor) == OK else None


def tensor_at(pointer: int, size_bytes: int) -> Memory | None:
    """Return the memory if it holds exactly one tensor object, else None."""
    place = memory(pointer, size_bytes)
    return None if place is None or size_bytes < HEADER_BYTES or parsed(place.view()) is None else place


class Shards(Tensors):
    """Calls for tensor parallelism. With a `tp_size` of 1 or less they are those for whole tensors."""

    def put_tensor_with_tp(self, key: Text, tensor: Any, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0) -> int:
        """Split the whole tensor and store the shards of all ranks."""
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
        """Return a code a tensor: the first failed code of its shards, or 0."""
        if tp_size <= 1:
            return self.batch_pub_tensor(base_keys, tensors_list, config)
        if len(base_keys) != len(tensors_list) or not has_segments(config) or not is_sound(config, len(base_keys)):
            return [INVALID_PARAMS] * len(base_keys)
        config = _without_groups(config)
        return [self._put_shards(key, tensor, config, tp_size, split_dim) for key, tensor in zip(base_keys, tensors_list, strict=True)]

    def put_tensor_with_tp_from(
        self, key: Text, buffer_ptr: Number, size: Number, tp_rank: Integer = 0, tp_size: Integer = 1, split_dim: Integer = 0
    ) -> int:
        """Split a whole tensor in memory, in the form of `get_tensor_into`, and store the shards."""
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
        """Return the rank's shard in the caller's memory, which must outlive it."""
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
    """Return the objects of all ranks; empty if the tensor cannot be split into equal shards."""
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
    """Return the config without groups, which have no effect here but must match the number of objects."""
    found = ReplicateConfig()
    found.with_hard_pin = config.with_hard_pin
    return found
