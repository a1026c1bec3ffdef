"""Keys of LMCache's chunks: equal for what may be shared, different for what may not."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvstore.engines.lmcache.keys import MAX_KEY_BYTES, ChunkKeys, by_namespace
from kvstore.engines.lmcache.settings import LMCacheSettings
from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True)
class Object:
    """The fields of LMCache's ObjectKey."""

    chunk_hash: bytes = b"\x01" * 32
    model_name: str = "llama"
    kv_rank: int = 0x02000200
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Chunk:
    """The fields of LMCache's CacheEngineKey."""

    model_name: str = "llama"
    world_size: int = 2
    worker_id: int = 0
    chunk_hash: int | bytes = 0xBEEF
    tags: tuple[tuple[str, Any], ...] | None = None


@dataclass(frozen=True)
class Layer(Chunk):
    """LayerCacheEngineKey."""

    layer_id: int = 0


def settings(**changed: Any) -> LMCacheSettings:
    return LMCacheSettings(**({"dtype": "bfloat16"} | changed))


KEYS = ChunkKeys(settings())


def object_key(changed: dict[str, Any], settings: LMCacheSettings | None = None) -> bytes:
    keys = KEYS if settings is None else ChunkKeys(settings)
    return keys.of_object(replace(Object(), **changed))[1]


def test_equal_objects_of_equal_settings_have_one_key() -> None:
    assert object_key({}) == object_key({}, settings())


@pytest.mark.parametrize(
    "changed",
    [
        {"chunk_hash": b"\x02" * 32},
        {"chunk_hash": b"\x01" * 31},
        {"model_name": "llama-2"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"cache_salt": "user"},
    ],
)
def test_an_object_that_differs_in_any_field_has_another_key(changed: dict[str, Any]) -> None:
    assert object_key(changed) != object_key({})


def test_a_rank_is_not_taken_for_a_group_nor_a_group_for_a_hash() -> None:
    assert object_key({"kv_rank": 0x11, "object_group_id": 1}) != object_key({"kv_rank": 0x1, "object_group_id": 0x11})
    assert object_key({"object_group_id": 1, "chunk_hash": b"2:x"}) != object_key({"object_group_id": 0x12, "chunk_hash": b":x"})


@pytest.mark.parametrize("changed", [{"dtype": "float16"}, {"revision": "a1"}, {"salt": "secret"}, {"chunk_tokens": 128}])
def test_servers_that_differ_in_what_changes_bytes_share_nothing(changed: dict[str, Any]) -> None:
    assert object_key({}, settings(**changed)) != object_key({})


def test_who_and_where_the_store_is_changes_no_key() -> None:
    assert object_key({}, settings(master="other:1", load_deadline_s=1.0)) == object_key({})


def test_a_salt_of_the_settings_is_not_taken_for_one_of_a_user() -> None:
    assert object_key({"cache_salt": "b"}, settings(salt="a")) != object_key({"cache_salt": ""}, settings(salt="ab"))
    assert object_key({"cache_salt": "ab"}) != object_key({}, settings(salt="ab"))


def test_objects_of_one_model_and_user_share_a_namespace() -> None:
    namespaces = {KEYS.of_object(Object(kv_rank=rank, object_group_id=group))[0].id for rank in range(3) for group in range(3)}
    assert len(namespaces) == 1
    namespace, key = KEYS.of_object(Object())
    assert key.startswith(namespace.id)
    assert (namespace.model, namespace.dtype, namespace.block_tokens) == ("llama", "bfloat16", 256)


def test_a_hash_of_any_length_makes_a_key_that_the_store_takes() -> None:
    keys = [object_key({"chunk_hash": b"\x01" * length}) for length in (1, 200, 229, 230, 1000, 1001)]
    assert len(set(keys)) == len(keys)
    assert max(map(len, keys)) <= MAX_KEY_BYTES


def test_a_model_without_a_name_has_no_keys() -> None:
    with pytest.raises(InvalidArgument, match="model"):
        object_key({"model_name": ""})


def chunk_key(chunk: Chunk, dtype: str = "half", form: str = "naive") -> bytes:
    return KEYS.of_chunk(chunk, dtype, form)[1]


@pytest.mark.parametrize(
    "other",
    [
        Chunk(model_name="llama-2"),
        Chunk(world_size=4),
        Chunk(worker_id=1),
        Chunk(chunk_hash=0xBEE),
        Chunk(chunk_hash=-0xBEEF),
        Chunk(chunk_hash=bytes.fromhex("beef")),
        Chunk(tags=(("user", "a"),)),
        Chunk(tags=(("user", "a"), ("team", 1))),
        Layer(layer_id=0),
        Layer(layer_id=1),
    ],
)
def test_a_chunk_that_differs_in_any_field_has_another_key(other: Chunk) -> None:
    assert chunk_key(other) != chunk_key(Chunk())
    assert chunk_key(other) == chunk_key(replace(other))


def test_chunk_of_another_dtype_or_form_has_another_key() -> None:
    assert chunk_key(Chunk(), "half") != chunk_key(Chunk(), "bfloat16")
    assert chunk_key(Chunk(), form="naive") != chunk_key(Chunk(), form="cachegen")
    assert KEYS.of_chunk(Chunk(), "half", "naive")[0].dtype == "half"


def test_tags_are_not_taken_for_one_another() -> None:
    assert chunk_key(Chunk(tags=(("a", "b@c%d"),))) != chunk_key(Chunk(tags=(("a", "b"), ("c", "d"))))


def test_tags_of_any_kind_and_length_make_valid_keys() -> None:
    keys = {chunk_key(Chunk(tags=(("tag", value),))) for value in ("x" * 300, "x" * 301, object, 1.5, None)}
    assert len(keys) == 5
    assert max(map(len, keys)) <= MAX_KEY_BYTES


def test_what_one_plug_in_stores_the_other_does_not_see() -> None:
    assert KEYS.of_chunk(Chunk(), "bfloat16", "naive")[0].id != KEYS.of_object(Object())[0].id


def test_keys_of_one_namespace_are_put_together() -> None:
    objects = [Object(), Object(cache_salt="a"), Object(kv_rank=1), Object(cache_salt="a", kv_rank=2)]
    assert list(by_namespace(map(KEYS.of_object, objects)).values()) == [[0, 2], [1, 3]]
    assert by_namespace([]) == {}
