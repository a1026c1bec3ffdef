"""What an engine calls its blocks: keys from token ids, as engines' connectors make them, for whoever looks for blocks without an engine.

    kvstore   the keys of a Namespace (hashing.py)
    vllm      the id of a Namespace, and vLLM's own hash of the block

vLLM's hash is SHA-256 over the pickled triple (hash of the block before, its token ids as a tuple, what else the block depends on), and the
first block follows the hash of a seed. Nothing is ever unpickled here. What else a block depends on is None for a text without an adapter
and without a salt; others are not named here, so that nobody finds them.

Source: vLLM 0.32, `--prefix-caching-hash-algo sha256`, its default; tests/engines/live compares with the real one.
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
"""What vLLM hashes for the block before the first one, unless PYTHONHASHSEED is set."""


class Naming(Protocol):
    """Immutable, so that threads may share it."""

    @property
    def block_tokens(self) -> int: ...

    def block_keys(self, token_ids: TokenIds) -> list[bytes]:
        """One for each full block. Raises InvalidArgument: these are no token ids."""
        ...

    def following(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """The key of the block of these `block_tokens` tokens after that of key `parent`, None: at the beginning."""
        ...


class NamespaceNaming:
    """As kvstore's own library names them."""

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
    """As kvstore's connector in vLLM names them."""

    def __init__(self, namespace_id: bytes, block_tokens: int, *, seed: str = VLLM_SEED) -> None:
        """`namespace_id`: of the rank; the connector logs it when it starts. Raises InvalidArgument unless it has ID_BYTES bytes."""
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
    """That of the settings. Raises ConfigError for an unknown kind and an id that is none."""
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
