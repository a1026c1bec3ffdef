"""Store keys of LMCache's chunks, built from the fields of LMCache's own keys. Imports neither LMCache nor the client.

A key is the id of a kvcache Namespace, then the rank, object group or layer, then LMCache's chunk hash. The namespace
covers the model, its dtype and the salts; the hash covers the tokens up to the chunk's end. Servers share chunks
exactly if their keys are equal: same model name, parallel setup, hash function and chunk size in LMCache, and same
settings here.
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
"""Cached namespaces: LMCache's salts may create many."""
_LONG: Final = b"long:"
"""Prefix of the digest of a long name; other names begin with a hexadecimal digit or a bracket."""


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
    """LMCache's key of a chunk in a remote backend. A key of a single layer also has `layer_id`."""

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
    """Builds the keys of one plug-in. Thread-safe."""

    def __init__(self, settings: LMCacheSettings) -> None:
        self._settings = settings
        self._namespaces = lru_cache(MAX_NAMESPACES)(self._namespace)

    def of_object(self, key: ObjectKey) -> tuple[Namespace, bytes]:
        """Return namespace and key of an L2 adapter's object. Raises InvalidArgument: the model or the salt is
        invalid in a namespace."""
        namespace = self._namespaces(key.model_name, self._settings.dtype, key.cache_salt, "l2")
        return namespace, _key(namespace, b"%x:%x:" % (key.kv_rank, key.object_group_id) + key.chunk_hash)

    def of_chunk(self, key: EngineKey, dtype: str, form: str) -> tuple[Namespace, bytes]:
        """Return namespace and key of a remote backend's chunk. `form` is its serialization. Raises as `of_object`."""
        namespace = self._namespaces(key.model_name, dtype, "", f"remote, {form}")
        chunk_hash = key.chunk_hash.hex() if isinstance(key.chunk_hash, bytes) else key.chunk_hash
        parts = [key.world_size, key.worker_id, getattr(key, "layer_id", None), chunk_hash, key.tags]
        return namespace, _key(namespace, json.dumps(parts, default=str, separators=(",", ":")).encode())

    def _namespace(self, model: str, dtype: str, salt: str, plug_in: str) -> Namespace:
        """Return the namespace. Plug-ins do not share: a remote backend's chunks may be compressed or have a header."""
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
    """Return the indices of the keys of each namespace, because a put has one namespace."""
    found: dict[Namespace, list[int]] = {}
    for index, (namespace, _) in enumerate(named):
        found.setdefault(namespace, []).append(index)
    return found


def _key(namespace: Namespace, name: bytes) -> bytes:
    key = namespace.id + name
    return key if len(key) <= MAX_KEY_BYTES else namespace.id + _LONG + blake2b(name, digest_size=32).digest()
