"""Keys of LMCache's chunks in the store, from the fields of LMCache's own keys; knows neither LMCache nor the store.

A key is the id of a kvcache Namespace, which covers the model, its dtype and the salts, and LMCache's hash of the chunk, which covers its
tokens and all before it, behind what else tells chunks of one namespace apart: the rank, the object group, the layer. Servers share chunks
exactly when their keys are equal: the same model name, parallel setup, hash function and chunk size in LMCache, the same settings here.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Protocol

from kvstore.engines.lmcache.settings import LMCacheSettings
from kvstore.kvcache.namespace import Namespace

MAX_KEY_BYTES: Final = 255
MAX_NAMESPACES: Final = 4096
"""That are remembered, of those that LMCache's salts make."""
_LONG: Final = b"long:"
"""Before the digest of a name that is too long; others begin with a hexadecimal number or a bracket."""


class ObjectKey(Protocol):
    """LMCache's key of an object in an L2 adapter."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


class EngineKey(Protocol):
    """LMCache's key of a chunk in a remote backend. That of one layer of a chunk has `layer_id` too."""

    @property
    def model_name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def worker_id(self) -> int: ...
    @property
    def chunk_hash(self) -> int | bytes: ...
    @property
    def tags(self) -> tuple[tuple[str, Any], ...] | None: ...


class ChunkKeys:
    """The keys of one plug-in. Thread-safe."""

    def __init__(self, settings: LMCacheSettings) -> None:
        self._settings = settings
        self._namespaces = lru_cache(MAX_NAMESPACES)(self._namespace)

    def of_object(self, key: ObjectKey) -> tuple[Namespace, bytes]:
        """Namespace and key of an object of an L2 adapter. Raises InvalidArgument for a model or a salt that no namespace can have."""
        namespace = self._namespaces(key.model_name, self._settings.dtype, key.cache_salt, "l2")
        return namespace, _key(namespace, b"%x:%x:" % (key.kv_rank, key.object_group_id) + key.chunk_hash)

    def of_chunk(self, key: EngineKey, dtype: str, form: str) -> tuple[Namespace, bytes]:
        """Namespace and key of a chunk of a remote backend, of LMCache's `dtype`; `form` is how it is written. Raises as `of_object`."""
        namespace = self._namespaces(key.model_name, dtype, "", f"remote, {form}")
        chunk_hash = key.chunk_hash.hex() if isinstance(key.chunk_hash, bytes) else key.chunk_hash
        parts = [key.world_size, key.worker_id, getattr(key, "layer_id", None), chunk_hash, key.tags]
        return namespace, _key(namespace, json.dumps(parts, default=str, separators=(",", ":")).encode())

    def _namespace(self, model: str, dtype: str, salt: str, plug_in: str) -> Namespace:
        """What one plug-in writes is not what another would read: a remote backend's chunks may be compressed, or have a header."""
        settings = self._settings
        return Namespace(
            model=model,
            revision=settings.revision,
            dtype=dtype,
            block_tokens=settings.chunk_tokens,
            extra={"engine": "lmcache", "plug-in": plug_in},
            salt=f"{len(settings.salt)}:{settings.salt}{salt}" if settings.salt or salt else "",
            hash="sha256",
        )


def by_namespace(named: Iterable[tuple[Namespace, bytes]]) -> dict[Namespace, list[int]]:
    """The indices of keys of each namespace: a call to the store puts those of one."""
    found: dict[Namespace, list[int]] = {}
    for index, (namespace, _) in enumerate(named):
        found.setdefault(namespace, []).append(index)
    return found


def _key(namespace: Namespace, name: bytes) -> bytes:
    key = namespace.id + name
    return key if len(key) <= MAX_KEY_BYTES else namespace.id + _LONG + blake2b(name, digest_size=32).digest()
