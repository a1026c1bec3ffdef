"""Blocks are shared by engines whose bytes are the same, and by no others.

An engine whose blocks would be lost or wrong is refused with what to change.
"""

import dataclasses

import pytest

from kvstore.engines.vllm.identity import RankFacts, Shard, Variant, check_hash, check_images, long_rope, shard
from kvstore.protocol.errors import ConfigError

FACTS = RankFacts(
    model="models/llama",
    config='{"rope": 1}',
    rope="",
    settings="",
    draft="",
    dtype="float32",
    cache_dtype="auto",
    quantization="",
    quantization_config="",
    block_tokens=128,
    hash_algorithm="sha256",
    device="cpu",
    layers=("layers.0 CPU_ATTN/vec float32 [1, 2, 128, 128]", "layers.1 CPU_ATTN/vec float32 [1, 2, 128, 128]"),
    pools=("layers.0 fp8_e4m3 FullAttentionSpec",),
    tp_rank=0,
    tp_size=1,
    kv_replicas=1,
)


def of_rank(tp_rank: int, *, size: int, replicas: int = 1) -> Shard:
    return shard(dataclasses.replace(FACTS, tp_rank=tp_rank, tp_size=size, kv_replicas=replicas))


def test_a_key_is_the_namespace_and_the_engine_s_own_hash() -> None:
    one = shard(FACTS)
    assert one.canonical() == [one.namespace.canonical()]
    assert one.keys([b"a" * 32, b"b" * 32]) == [one.namespace.id + b"a" * 32, one.key(b"b" * 32)]
    assert shard(FACTS) == one


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model", "models/qwen"),
        ("config", '{"rope": 2}'),
        ("rope", "long of 4096"),
        ("settings", "ModelConfig.convert=x"),
        ("pools", ("layers.0 fp8_e5m2 FullAttentionSpec",)),
        ("draft", "eagle models/draft"),
        ("dtype", "bfloat16"),
        ("cache_dtype", "fp8"),
        ("quantization", "awq"),
        ("quantization_config", "{'linear': 'fp8'}"),
        ("block_tokens", 64),
        ("hash_algorithm", "sha256_cbor"),
        ("device", "NVIDIA H200"),
        ("layers", ("layers.0 CPU_ATTN/amx float32 [1, 2, 128, 128]", "layers.1 CPU_ATTN/amx float32 [1, 2, 128, 128]")),
    ],
)
def test_engines_that_differ_in_what_changes_bytes_share_nothing(name: str, other: object) -> None:
    assert shard(dataclasses.replace(FACTS, **{name: other})).namespace.id != shard(FACTS).namespace.id  # type: ignore[arg-type]


def test_a_salt_gives_keys_of_its_own() -> None:
    assert len({shard(FACTS, salt=salt).namespace.id for salt in ("", "a", "b")}) == 3


def test_each_rank_has_its_own_unless_ranks_hold_equal_bytes() -> None:
    assert len({of_rank(rank, size=4).namespace.id for rank in range(4)}) == 4
    pairs = [of_rank(rank, size=4, replicas=2).namespace for rank in range(4)]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    assert len({of_rank(rank, size=4, replicas=4).namespace.id for rank in range(4)} | {shard(FACTS).namespace.id}) == 1


def test_one_of_ranks_with_equal_bytes_writes() -> None:
    ranks = [dataclasses.replace(FACTS, tp_rank=rank, tp_size=4, kv_replicas=2) for rank in range(4)]
    assert [facts.is_writer for facts in ranks] == [True, False, True, False]


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        {"text_config": {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su", "long_factor": [2.0]}}},
    ],
)
def test_longrope_has_other_keys_where_longer_prompts_are_taken(config: dict[str, object]) -> None:
    assert long_rope(config, 4096) == long_rope(config, 1024) == "short of 4096"
    assert long_rope(config, 4097) == "long of 4096"


def test_the_longest_prompt_changes_no_other_model_s_keys() -> None:
    assert long_rope({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}, 8192) == ""


def test_longrope_without_training_length_depends_on_max_length() -> None:
    assert long_rope({"rope_scaling": {"rope_type": "longrope"}}, 8192) == "8192"


def test_shard_of_a_variant_names_its_weights_and_adapter() -> None:
    template = shard(FACTS, salt="s")
    variants = [Variant("a"), Variant("b"), Variant("a", "lora"), Variant("a", "other")]
    assert len({template.of(variant).namespace.id for variant in variants}) == 4
    named = template.of(Variant("a", "lora")).namespace
    assert (named.revision, named.adapter, named.salt, named.extra) == ("a", "lora", "s", template.namespace.extra)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_of_one_process_are_refused_with_what_to_do(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=r"sha256.*PYTHONHASHSEED"):
        check_hash(algorithm, is_seeded=False)
    check_hash(algorithm, is_seeded=True)
    check_hash("sha256", is_seeded=False)


def test_images_that_are_called_by_no_content_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--enable-prefix-caching.*--mm-processor-cache-gb"):
        check_images(processor_cache_gb=0, has_prefix_cache=False)
    check_images(processor_cache_gb=0, has_prefix_cache=True)
    check_images(processor_cache_gb=4, has_prefix_cache=False)
