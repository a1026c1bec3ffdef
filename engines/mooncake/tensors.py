"""Calls that store and read torch tensors, whole and in shards of tensor parallelism, and files of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.client.memory import view_of
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.config import ReplicateConfig
from kvstore.engines.mooncake.gets import Gets
from kvstore.engines.mooncake.link import memory
from kvstore.engines.mooncake.puts import DEFAULT, Puts
from kvstore.engines.mooncake.tensor_values import HEADER_BYTES, decoded, encoded, size_of

Write = Callable[[Sequence[str], Sequence[Any], ReplicateConfig], list[int]]


class Tensors(Gets, Puts):
    """torch is imported by the first call. A tensor that is got is the caller's own, on the CPU; None for a miss and for what is no tensor.

    Shard i of a tensor that was put for several ranks is the object `KEY_tp_i`.
    """

    def put_tensor(self, key: str, tensor: Any) -> int:
        return self.batch_pub_tensor([key], [tensor])[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self.batch_pub_tensor(keys, tensors_list)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig = DEFAULT) -> int:
        return self.batch_pub_tensor([key], [tensor], config)[0]

    def batch_pub_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig = DEFAULT) -> list[int]:
        return self._write(self._put, keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor])[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self.batch_upsert_pub_tensor(keys, tensors_list)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig = DEFAULT) -> int:
        return self.batch_upsert_pub_tensor([key], [tensor], config)[0]

    def batch_upsert_pub_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig = DEFAULT) -> list[int]:
        return self._write(self._upsert, keys, tensors_list, config)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Of memory that `get_tensor_into` has filled: header and elements."""
        return self._write_from(self._put, keys, buffer_ptrs, sizes)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return self._write_from(self._upsert, keys, buffer_ptrs, sizes)

    def _write(self, write: Write, keys: Sequence[str], tensors: Sequence[Any], config: ReplicateConfig) -> list[int]:
        return write(keys, [encoded(tensor) for tensor in tensors], config)

    def _write_from(self, write: Write, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(pointers) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return write(keys, [_tensor_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)], DEFAULT)

    # --- reads ---

    def get_tensor(self, key: str) -> Any:
        def take(client: Client) -> Any | None:
            with client.view(self._key(key)) as value:
                return None if value is None else decoded(value, copies=True)

        return self._value(take)

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        return [self.get_tensor(key) for key in keys]

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """A tensor in the caller's memory, which must stay as long as it."""
        found = self.get_into(key, buffer_ptr, size)
        return None if found < 0 else decoded(view_of(buffer_ptr, found), copies=False)

    def batch_get_tensor_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """As `get_tensor_into` for each key; a code for each where there are not as many buffers and sizes."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        found = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [
            None if size < 0 else decoded(view_of(pointer, size), copies=False) for pointer, size in zip(buffer_ptrs, found, strict=True)
        ]

    # --- shards ---

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Cut the whole tensor into the shards of all ranks."""
        return self.batch_pub_tensor_with_tp([key], [tensor], DEFAULT, tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self, base_keys: Sequence[str], tensors_list: Sequence[Any], tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> list[int]:
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, DEFAULT, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self, key: str, tensor: Any, config: ReplicateConfig = DEFAULT, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig = DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """A code a tensor: the first of its shards that is no success."""
        if tp_size <= 1:
            return self.batch_pub_tensor(base_keys, tensors_list, config)
        codes = []
        for key, tensor in zip(base_keys, tensors_list, strict=True):
            shards = tensor.chunk(tp_size, split_dim) if tensor.dim() else ()
            if len(shards) != tp_size:
                codes.append(INVALID_PARAMS)
                continue
            written = self.batch_pub_tensor([_shard(key, rank) for rank in range(tp_size)], shards, config)
            codes.append(next((code for code in written if code != OK), OK))
        return codes

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """The rank's shard."""
        return self.get_tensor(key if tp_size <= 1 else _shard(key, tp_rank))

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> list[Any]:
        return [self.get_tensor_with_tp(key, tp_rank, tp_size) for key in base_keys]

    # --- files ---

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Needs the package safetensors. Without a name the file has the key's."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return OBJECT_NOT_FOUND
        save_file({key: tensor}, file_name or key)
        return OK

    def load_tensor_from_safetensor(self, key: str | None, file_name: str) -> Any | None:
        """The tensor called so in the file, else its first one, which is stored under the key; without a key under the file's name. None if
        there is no such file, or it could not be stored."""
        from safetensors.torch import load_file

        if not Path(file_name).is_file():
            return None
        found = load_file(file_name)
        name = key if key is not None else file_name
        tensor = found.get(name, next(iter(found.values()), None))
        return tensor if tensor is not None and self.put_tensor(name, tensor) == OK else None


def _shard(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


def _tensor_at(pointer: int, size_bytes: int) -> Any | None:
    """The memory of the object that begins there; None for what is no tensor, or does not end within the size."""
    place = memory(pointer, size_bytes)
    if place is None or size_bytes < HEADER_BYTES:
        return None
    found = size_of(place.view())
    return None if found is None or found > size_bytes else memory(pointer, found)
