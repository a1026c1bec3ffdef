"""From token ids to block keys: a chain of hashes in which each key stands for its block and for everything before it.

    key_0 = the namespace's id, never returned
    key_i = H(key_{i-1} || tokens_i || extra_i),  i = 1, 2, ...

tokens_i is the block's `block_tokens` token ids as int32, little-endian. extra_i is nothing for a block without extra bytes, else
their length as u32, little-endian, and the bytes: since the namespace fixes the length of tokens_i, whatever follows it is the
extra, so neither an absent nor an empty one can be taken for tokens. H is xxh3_128 (16-byte keys, its canonical big-endian digest)
or SHA-256 (32-byte keys). A last block that is not full has no key.

tests/kvcache/vectors.json fixes all of this: a change here is a change of format, and every stored block would be lost.
This file does not know what a namespace is made of: that is namespace.py.
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
"""Extra bytes of one block. They stand for hashes of images and the like, not for the images."""

_EXTRA_LENGTH: Final = struct.Struct("<I")
_INT32: Final = np.iinfo(np.int32)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


HASHES: Final[dict[HashName, Callable[[bytes], bytes]]] = {"xxh3": xxh3_128_digest, "sha256": _sha256}
"""H by name. xxh3 is not collision-proof against an adversary: where tenants do not trust one another, take sha256."""


def chain_keys(
    root: bytes, hash: HashName, block_tokens: int, token_ids: TokenIds, extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """The keys of a sequence's full blocks in the namespace of id `root`, oldest first.

    `extras` maps a block's index (0 is the first) to its extra bytes; those of blocks that are not full are ignored.

    Raises:
        InvalidArgument: the token ids are not integers of shape (tokens,) in [-2**31, 2**31), or an extra has no index or is not at most
            MAX_EXTRA_BYTES bytes.
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
    """A contiguous little-endian int32 array of shape (tokens,), which may share the memory of `token_ids`.

    For who makes keys of one sequence in several namespaces: an array costs `chain_keys` nothing. Raises InvalidArgument as that does.
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
    except TypeError as error:  # bfloat16, sparse and others that numpy has no name for
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
    # array() refuses floats, which numpy would cut off without a word, and takes the time of np.array(token_ids, np.int32).
    try:
        tokens = np.asarray(array("i", token_ids))
    except TypeError as error:
        raise InvalidArgument(f"token ids are integers of one dimension: {error}") from error
    except OverflowError as error:
        raise InvalidArgument("token ids are in [-2**31, 2**31)") from error
    # Only a 0 or 1 can have been a bool: asking just those for their type costs nothing, asking all doubles the conversion.
    if any(isinstance(token_ids[index], bool) for index in np.flatnonzero((tokens | 1) == 1).tolist()):
        raise InvalidArgument("token ids are integers, not bool: a mask was given in their place")
    return np.ascontiguousarray(tokens, "<i4")
