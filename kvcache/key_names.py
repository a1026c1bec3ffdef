"""Block keys from token ids, as engines' connectors compute them, for components that look up blocks without an engine.

    kvstore   keys of a Namespace (hashing.py)
    vllm      id of a Namespace, followed by vLLM's own block hash

vLLM's hash is SHA-256 over a pickled triple: parent hash, token ids as a tuple, extra keys. The first block's parent is
the hash of a seed. Nothing is unpickled here. The extra keys are None for text without an adapter and a salt; blocks
with other extra keys are not named, so they are not found.

Source: vLLM 0.32, `--prefix-caching-hash-algo sha256`, its default; tests/engines/live compares with it.
"""

import pickle
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, Protocol

from kvstore.kvcache.hashing import HASHES, TokenIds, as_int32
from kvstore.kvcache.namespace import ID_BYTES, Namespace
from kvstore.protocol.errors import ConfigError, InvalidArgument

KVSTORE: Final = "kvstore"
VLLM: Final = "vllm"
NAMINGS: Final = (KVSTORE, VLLM)
VLLM_SEED: Final = "vllm-none-hash"
"""vLLM's parent of the first block is the hash of this text, unless PYTHONHASHSEED is set."""


class Naming(Protocol):
    """Computes block keys. Immutable, so threads may share it."""

    @property
    def block_tokens(self) -> int: ...

    def block_keys(self, token_ids: TokenIds) -> list[bytes]:
        """Return one key for each full block. Raises InvalidArgument: invalid token ids."""
        ...

    def following(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """Return the key of a block of `block_tokens` tokens whose parent has key `parent`; None: the first block."""
        ...


class NamespaceNaming:
    """Keys of kvstore's own library."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._hash = HASHES[namespace.hash]

    @property
    def block_tokens(self) -> int:
        return self._namespace.block_tokens

    def block_keys(self, token_ids: TokenIds) -> list[bytes]:
        return self._namespace.block_keys(token_ids)

    def following(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        return self._hash((self._namespace.id if parent is None else parent) + as_int32(token_ids).tobytes())


class VllmNaming:
    """Keys of kvstore's connector in vLLM."""

    def __init__(self, namespace_id: bytes, block_tokens: int, *, seed: str = VLLM_SEED) -> None:
        """Create it for the namespace of a rank, which the connector logs at start. Raises InvalidArgument unless
        the id has ID_BYTES bytes."""
        if len(namespace_id) != ID_BYTES:
            raise InvalidArgument(f"a namespace's id has {ID_BYTES} bytes, not {len(namespace_id)}")
        self._id = namespace_id
        self._block_tokens = block_tokens
        self._seed = _digest(seed)

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    def block_keys(self, token_ids: TokenIds) -> list[bytes]:
        tokens = as_int32(token_ids).tolist()
        size, before, keys = self._block_tokens, self._seed, []
        for start in range(0, len(tokens) - size + 1, size):
            before = _digest((before, tuple(tokens[start : start + size]), None))
            keys.append(self._id + before)
        return keys

    def following(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        before = self._seed if parent is None else parent[ID_BYTES:]
        return self._id + _digest((before, tuple(token_ids), None))


def make_naming(kind: str, *, model: str, dtype: str, block_tokens: int, namespace_id: str) -> Naming:
    """Return the naming that the settings select. Raises ConfigError: an unknown kind, or an invalid id."""
    match kind:
        case "kvstore":
            return NamespaceNaming(Namespace(model=model, dtype=dtype, block_tokens=block_tokens))
        case "vllm":
            try:
                return VllmNaming(bytes.fromhex(namespace_id), block_tokens)
            except (ValueError, InvalidArgument):
                raise ConfigError(
                    f"namespace_id is the id that the engine's connector logs, {2 * ID_BYTES} hex digits, not {namespace_id!r}"
                ) from None
    raise ConfigError(f"naming is one of {', '.join(NAMINGS)}, not {kind!r}")


def _digest(value: object) -> bytes:
    return sha256(pickle.dumps(value, protocol=5)).digest()
