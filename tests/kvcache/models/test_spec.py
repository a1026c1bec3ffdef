"""A cache has the size that its formulas say: those of single records summed up, and the worked figures of the literature.

Worked figures mix their units: "320 KB" and "128 KB" a token and "256 MB" at 2k are KiB and MiB; "1.3 GB", "10.5 GB" and "1.05 TB" are
320,000 bytes a token times the tokens; "9.4 GB" is 4.7 MB times 2,000. Each test says which it is.
"""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.codecs.schemes import KINDS, NONE, CacheScheme, Scheme
from kvstore.kvcache.models.named import MODELS
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import InvalidArgument

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MB, GB, TB = 10**6, 10**9, 10**12

SMALL = CacheSpec(layers=4, heads=8, kv_heads=2, head_dim=64, block_tokens=32)
MLA = CacheSpec(layers=3, heads=16, kv_heads=1, head_dim=576, attention=Attention.MLA)
WINDOWED = replace(SMALL, window_tokens=100, windowed_layers=3)


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "at_2k_bytes"),
    [
        ("llama3-8b", 128 * KIB, 256 * MIB),
        ("llama3-70b", 320 * KIB, 640 * MIB),
        ("llama3-405b", 504 * KIB, 1008 * MIB),
        ("mistral-7b", 128 * KIB, 256 * MIB),
        ("gpt-3", 4608 * KIB, 9 * GIB),
    ],
)
def test_the_worked_table_of_models(name: str, bytes_per_token: int, at_2k_bytes: int) -> None:
    """The table has 504 KB and 1.0 GB for the 405B (1,008 MiB), 4.7 MB and 9.4 GB for GPT-3: see below."""
    spec = CacheSpec.named(name)
    assert spec.bytes_per_token == bytes_per_token
    assert spec.sequence_bytes(2048) == at_2k_bytes


def test_worked_figures_in_decimal_units() -> None:
    gpt3, llama = CacheSpec.named("gpt-3"), CacheSpec.named("llama3-70b")
    assert gpt3.bytes_per_token / MB == pytest.approx(4.7, abs=0.05)
    assert gpt3.sequence_bytes(2000) / GB == pytest.approx(9.4, abs=0.05)
    assert CacheSpec.named("llama3-405b").sequence_bytes(2048) / GB == pytest.approx(1.0, abs=0.06)
    assert llama.bytes_per_token == 327_680
    # 1.3 and 10.5 GB, and 1.05 TB for 100 sequences, are 2.4 % low: they take 320 KiB for 320,000 bytes.
    assert llama.sequence_bytes(4096) / GB == pytest.approx(1.3, rel=0.035)
    assert llama.sequence_bytes(32768) / GB == pytest.approx(10.5, rel=0.025)
    assert llama.batch_bytes([32768] * 100) / TB == pytest.approx(1.05, rel=0.025)
    assert 320_000 * 32768 * 100 / TB == pytest.approx(1.05, rel=0.002)


@pytest.mark.parametrize(("kv_heads", "gib"), [(8, 1), (32, 4)])
def test_grouped_queries_take_a_quarter_of_full_heads(kv_heads: int, gib: int) -> None:
    assert CacheSpec(layers=32, heads=32, kv_heads=kv_heads, head_dim=128).sequence_bytes(8192) == gib * GIB


def test_two_gpus_with_8_gb_hold_50_000_tokens_of_llama_3_70b() -> None:
    """160 KB a GPU. With KiB for KB, as they are, 48,828 tokens fit; 10 users of 5,000 tokens take a little more than there is."""
    rank = CacheSpec.named("llama3-70b").shard(2)
    assert rank.bytes_per_token == 160 * KIB
    assert 8 * GB / rank.bytes_per_token == pytest.approx(50_000, rel=0.025)
    assert 8 * GB / 160_000 == 50_000
    assert rank.batch_bytes([5000] * 9) < 8 * GB < rank.batch_bytes([5000] * 10) < 8.2 * GB


def test_int8_halves_a_long_context_but_for_its_scales() -> None:
    raw, int8 = (CacheSpec.named("llama3-70b", scheme=CacheScheme.parse(name)).sequence_bytes(32768) for name in ("none", "int8"))
    assert raw == 10 * GIB
    assert int8 == 5 * GIB + 32768 * 2 * 80 * 8 * 2


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_cache_agree_on_a_token(name: str) -> None:
    spec, facts = CacheSpec.named(name), MODELS[name]
    assert spec.bytes_per_token == facts.kv_bytes_per_token
    assert (spec.model, spec.layers, spec.heads) == (name, facts.layers, facts.heads)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gpt-3", Attention.MHA), ("llama3-8b", Attention.GQA), ("falcon-7b", Attention.MQA), ("deepseek-v3", Attention.MLA)],
)
def test_attention_is_what_the_heads_make_it(name: str, attention: Attention) -> None:
    assert CacheSpec.named(name).attention is attention


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    spec = CacheSpec.named("deepseek-v3")
    assert (spec.kv_heads, spec.head_dim, spec.kv_factor, spec.kinds) == (1, 512 + 64, 1, (True,))
    assert spec.bytes_per_token == 61 * 576 * 2
    assert spec.shard(8).bytes_per_token == spec.bytes_per_token


SCHEMES = [
    CacheScheme(Scheme(k, 32 if k.startswith("int4") or k == "int2" else 0), Scheme(v, 16 if v in ("int4", "int2") else 0))
    for k in KINDS
    for v in KINDS
]


@given(
    layers=st.integers(1, 6),
    kv_heads=st.integers(1, 4),
    block=st.sampled_from([32, 64]),
    scheme=st.sampled_from(SCHEMES),
    is_latent=st.booleans(),
)
def test_a_block_is_the_sum_of_its_records(layers: int, kv_heads: int, block: int, scheme: CacheScheme, is_latent: bool) -> None:
    shape: dict[str, Any] = {"kv_heads": 1, "attention": Attention.MLA} if is_latent else {"kv_heads": kv_heads}
    spec = CacheSpec(layers=layers, head_dim=64, block_tokens=block, scheme=scheme, dtype="float32", **shape)
    payload = metadata = 0
    for _ in range(spec.layers):
        for is_key in (True, False)[: 1 if is_latent else 2]:
            for _ in range(spec.kv_heads):
                one = scheme.k if is_key else scheme.v
                payload += one.payload_bytes(is_key, tokens=block, head_dim=64, dtype_bytes=4)
                metadata += one.metadata_bytes(is_key, tokens=block, head_dim=64, dtype_bytes=4)
                assert spec.record_bytes(is_key) == one.record_bytes(is_key, tokens=block, head_dim=64, dtype_bytes=4)
    assert (spec.payload_bytes, spec.metadata_bytes, spec.block_bytes) == (payload, metadata, payload + metadata)
    elements = spec.layers * spec.kv_factor * spec.kv_heads * block * 64
    assert spec.effective_bits == 8 * (payload + metadata) / elements


L, H, D, T = 32, 8, 128, 1024


def test_keys_and_values_may_be_of_different_bits() -> None:
    spec = replace(SMALL, scheme=CacheScheme.parse("k=int8,v=int4/32"))
    assert spec.block_bytes == 4 * 2 * (spec.record_bytes(True) + spec.record_bytes(False))
    assert (spec.record_bytes(True), spec.record_bytes(False)) == (32 * 64 + 32 * 2, 32 * 64 // 2 + 32 * 2 * 4)


def kept(spec: CacheSpec, tokens: int) -> list[list[int]]:
    """Of each layer the positions that the next query of a sequence of these tokens, the last one's, attends to: the naive definition."""
    layers = []
    for layer in range(spec.layers):
        window = spec.window_tokens if layer < spec.windowed_layers else tokens
        layers.append([position for position in range(tokens) if position > tokens - 1 - window])
    return layers


@given(tokens=st.integers(0, 400), window=st.integers(1, 200), windowed=st.integers(0, 4))
def test_a_window_keeps_the_last_tokens(tokens: int, window: int, windowed: int) -> None:
    spec = replace(SMALL, window_tokens=window if windowed else 0, windowed_layers=windowed)
    one_layer = spec.block_bytes // spec.layers
    assert spec.sequence_bytes(tokens) == Fraction(one_layer, spec.block_tokens) * sum(map(len, kept(spec, tokens)))


def test_mistrals_window_bounds_a_sequence() -> None:
    spec = CacheSpec.named("mistral-7b-v0.1")
    assert (spec.window_tokens, spec.windowed_layers) == (4096, 32)
    assert spec.sequence_bytes(4096) == spec.sequence_bytes(32768) == 512 * MIB


def test_gemma_3_keeps_long_contexts_in_one_layer_of_six() -> None:
    spec = CacheSpec.named("gemma-3-27b")
    assert spec.sequence_bytes(32768) == (10 * 32768 + 52 * 1024) * 2 * 16 * 128 * 2


@given(st.lists(st.integers(0, 5000), max_size=8))
def test_a_batch_is_the_sum_of_its_sequences(lengths: list[int]) -> None:
    """The closed form for unequal lengths: L hkv d (sK + sV) times the sum of them."""
    assert SMALL.batch_bytes(lengths) == 4 * 2 * 64 * (2 + 2) * sum(lengths)
    assert WINDOWED.batch_bytes(lengths) == sum(map(WINDOWED.sequence_bytes, lengths))


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(1, 8, 2), (2, 4, 1), (4, 2, 1), (8, 1, 1)])
def test_a_rank_keeps_its_heads_or_a_copy_of_one(tp: int, heads: int, kv_heads: int) -> None:
    rank = SMALL.shard(tp)
    assert (rank.heads, rank.kv_heads) == (heads, kv_heads)
    assert rank.block_bytes == SMALL.block_bytes * kv_heads / 2


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_heads_that_cannot_be_divided_are_refused(tp: int) -> None:
    with pytest.raises(InvalidArgument, match=f"tp is {tp}: 8 heads and 2 KV heads cannot be divided among that many ranks"):
        SMALL.shard(tp)
    with pytest.raises(InvalidArgument, match="tp is 4"):
        CacheSpec(layers=1, heads=24, kv_heads=6, head_dim=8).shard(4)


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "dtype": "float32",
}


def test_a_configuration_is_read_from_a_mapping_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    expected = CacheSpec(layers=2, heads=4, kv_heads=2, head_dim=16, dtype="float32", model="llama")
    assert CacheSpec.from_config(CONFIG) == expected
    assert CacheSpec.from_config(path) == CacheSpec.from_config(str(path)) == replace(expected, model=tmp_path.name)
    assert CacheSpec.named(str(path)).model == tmp_path.name
    quantised = CacheSpec.from_config(CONFIG, block_tokens=32, dtype="bfloat16", scheme=CacheScheme.parse("int4/16"))
    assert quantised == replace(expected, block_tokens=32, dtype="bfloat16", scheme=CacheScheme.parse("int4/16"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers is 0: it must be a whole number from 1 to 1048576"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 64.0}, "head_dim is 64.0"),
        ({"block_tokens": True}, "block_tokens is True"),
        ({"layers": 1 << 21}, "layers is 2097152"),
        ({"heads": -8}, "heads is -8: it must be a whole number from 0"),
        ({"heads": 7}, "heads is 7: it must be a multiple of kv_heads, 2"),
        ({"dtype": "bf16"}, "dtype is 'bf16': take one of float64, float32"),
        ({"attention": Attention.MQA}, "attention is mqa, but 8 heads .* 2 KV heads are gqa: leave it out"),
        ({"attention": Attention.MLA}, "kv_heads is 2: with latent attention .mla. it is 1"),
        ({"window_tokens": 4}, "window_tokens is 4 and windowed_layers 0: both must be 0 or both above 0, and there are 4 layers"),
        ({"windowed_layers": 2}, "window_tokens is 0 and windowed_layers 2"),
        ({"window_tokens": 4, "windowed_layers": 5}, "windowed_layers 5"),
        ({"scheme": CacheScheme(Scheme("int4", 64), NONE.v)}, "int4/64 of K needs block_tokens to be a multiple of 64, not 32"),
        ({"scheme": CacheScheme(NONE.k, Scheme("int4", 128))}, "int4/128 of V needs head_dim to be a multiple of 128, not 64"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_what_would_do(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CacheSpec(**{"layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "block_tokens": 32} | wrong)


def test_with_latent_attention_only_the_scheme_of_keys_counts() -> None:
    spec = replace(MLA, scheme=CacheScheme(Scheme("int8"), Scheme("int4", 128)))
    assert spec.block_bytes == 3 * (16 * 576 + 16 * 2)


def test_a_sequence_has_no_negative_length() -> None:
    with pytest.raises(InvalidArgument, match="tokens is -1: a sequence has 0 or more"):
        SMALL.sequence_bytes(-1)
