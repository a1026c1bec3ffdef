"""Block keys from token ids: a hash chain in which each key identifies its block and everything before it.

    key_0 = the namespace's id, never returned
    key_i = H(key_{i-1} || tokens_i || extra_i),  i = 1, 2, ...

- tokens_i: the block's `block_tokens` token ids as int32, little-endian.
- extra_i: empty for a block without extra bytes, else their length as u32, little-endian, and the bytes. The namespace
  fixes the length of tokens_i, so absent, empty and non-empty extras cannot collide with tokens.
- H: xxh3_128 (16-byte keys, its canonical big-endian digest) or SHA-256 (32-byte keys).

A partial last block has no key.

tests/kvcache/vectors.json fixes the format: a change here makes every stored block unreachable. namespace.py defines
the id.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvstore.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

HashName = Literal["xxh3", "sha256"]
TokenIds: TypeAlias = "Sequence[int] | memoryview | npt.NDArray[np.integer[Any]] | torch.Tensor"
"""Token ids of shape (tokens,), each in [-2**31, 2**31): any sequence of int, or an array of any integer dtype and strides."""
Int32Array: TypeAlias = npt.NDArray[np.int32]

MAX_EXTRA_BYTES: Final = 65_536
"""Limit of one block's extra bytes: pass hashes of images, not images."""

_EXTRA_LENGTH: Final = struct.Struct("<I")
_INT32: Final = np.iinfo(np.int32)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


HASHES: Final[dict[HashName, Callable[[bytes], bytes]]] = {"xxh3": xxh3_128_digest, "sha256": _sha256}
"""H by name. xxh3 does not resist attackers who construct collisions: use sha256 if tenants do not trust each other."""


def chain_keys(
    root: bytes, hash: HashName, block_tokens: int, token_ids: TokenIds, extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """Return the keys of a sequence's full blocks in the namespace with id `root`, in order.

    `extras` maps a block's index, from 0, to its extra bytes; those of partial blocks are ignored.

    Raises:
        InvalidArgument: token ids are not integers of shape (tokens,) in [-2**31, 2**31), an index is invalid, or an
            extra is longer than MAX_EXTRA_BYTES.
    """
    tokens = as_int32(token_ids)
    # All blocks become bytes in one C loop: with xxh3, a third less per block than slicing them one by one.
    blocks: list[bytes] = tokens[: len(tokens) - len(tokens) % block_tokens].view(np.dtype((np.void, 4 * block_tokens))).tolist()
    for index, extra in (extras or {}).items():
        if not isinstance(index, int) or index < 0:
            raise InvalidArgument(f"extras are keyed by the index of a block, 0 or more, not {index!r}")
        if not isinstance(extra, bytes) or len(extra) > MAX_EXTRA_BYTES:
            raise InvalidArgument(f"the extra of block {index} must be at most {MAX_EXTRA_BYTES} bytes: give a hash of the content")
        if index < len(blocks):
            blocks[index] += _EXTRA_LENGTH.pack(len(extra)) + extra
    digest, key, keys = HASHES[hash], root, []
    for block in blocks:
        key = digest(key + block)
        keys.append(key)
    return keys


def as_int32(token_ids: TokenIds) -> Int32Array:
    """Return a contiguous little-endian int32 array of shape (tokens,), which may share the memory of `token_ids`.

    Use it to compute keys of one sequence in several namespaces: `chain_keys` does not convert it again. Raises
    InvalidArgument as `chain_keys`.
    """
    # Only a process that has imported torch can hold a tensor, so this file need not import it.
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(token_ids, torch_module.Tensor):
        return _array_as_int32(_tensor_as_array(token_ids))
    if isinstance(token_ids, np.ndarray | array | memoryview):
        return _array_as_int32(np.asarray(token_ids))
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray):
        return _sequence_as_int32(token_ids)
    raise InvalidArgument(f"token ids are a sequence of int, a numpy array or a torch tensor, not {type(token_ids).__name__}")


def _tensor_as_array(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    try:
        array_on_cpu: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    except TypeError as error:  # bfloat16, sparse and other types that numpy lacks
        raise InvalidArgument(f"token ids must be a dense tensor of integers, not {tensor.dtype}") from error
    return array_on_cpu


def _array_as_int32(tokens: npt.NDArray[Any]) -> Int32Array:
    if tokens.ndim != 1:
        raise InvalidArgument(f"token ids have one dimension, not shape {tokens.shape}: give one sequence at a time")
    if tokens.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids are integers, not {tokens.dtype}: convert them first")
    if len(tokens) and not np.can_cast(tokens.dtype, np.int32) and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
        raise InvalidArgument(f"token ids are in [-2**31, 2**31), not {tokens.min()} to {tokens.max()}")
    return np.ascontiguousarray(tokens, "<i4")


def _sequence_as_int32(token_ids: Sequence[int]) -> Int32Array:
    # array() rejects floats, which numpy would truncate silently, and is as fast as np.array(token_ids, np.int32).
    try:
        tokens = np.asarray(array("i", token_ids))
    except TypeError as error:
        raise InvalidArgument(f"token ids are integers of one dimension: {error}") from error
    except OverflowError as error:
        raise InvalidArgument("token ids are in [-2**31, 2**31)") from error
    # Only a 0 or 1 can be a bool: checking the type of just those is free, checking all doubles the conversion's time.
    if any(isinstance(token_ids[index], bool) for index in np.flatnonzero((tokens | 1) == 1).tolist()):
        raise InvalidArgument("token ids are integers, not bool: pass the ids, not a mask")
    return np.ascontiguousarray(tokens, "<i4")
