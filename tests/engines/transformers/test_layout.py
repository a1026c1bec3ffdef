"""Promises of layout.py: blocks of caches whose layers differ in heads and sizes come back as they were.

Promises of identity.py: two models have different identities if and only if their bytes would differ.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore.engines.transformers.layout import Layout, layout_of, layout_of_cache, namespace_of, weights_id
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from tests.engines.transformers.tiny import llama

BLOCK_TOKENS = 4


def cache_of(*shapes: tuple[int, int, int], rows: int = 2, tokens: int = 11, dtype: torch.dtype = torch.bfloat16) -> DynamicCache:
    """With layers of these (heads, head_dim of keys, head_dim of values)."""
    cache = DynamicCache()
    for number, (heads, of_keys, of_values) in enumerate(shapes):
        keys, values = (torch.randn(rows, heads, tokens, head_dim).to(dtype) for head_dim in (of_keys, of_values))
        cache.update(keys, values, number)
    return cache


@pytest.fixture
def cache() -> DynamicCache:
    """As of latent attention, whose keys are longer than its values, and a layer of another size."""
    return cache_of((3, 6, 4), (1, 2, 2))


@pytest.fixture
def layout(cache: DynamicCache) -> Layout:
    return layout_of_cache(cache, BLOCK_TOKENS)


class OfAnOlderRelease(torch.nn.Module):  # type: ignore[misc]
    """A model whose forward pass calls its cache what transformers did before 5.24."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.config, self.device = self.model.config, self.model.device

    def forward(self, input_ids: torch.Tensor, past_key_values: DynamicCache, *, use_cache: bool) -> object:
        return self.model(input_ids, cache=past_key_values, use_cache=use_cache)


def test_cache_is_passed_under_its_release_specific_name() -> None:
    assert layout_of(OfAnOlderRelease(), BLOCK_TOKENS) == layout_of(llama(), BLOCK_TOKENS)


def test_a_value_has_the_keys_and_then_the_values_of_each_layer(cache: DynamicCache, layout: Layout) -> None:
    assert layout.block_bytes == 2 * BLOCK_TOKENS * (3 * (6 + 4) + 2 + 2)
    out = torch.zeros(1, layout.block_bytes, dtype=torch.uint8)
    layout.gather(cache, 1, 1, out)
    expected = [tensor[1, :, 4:8].reshape(-1) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert out.view(torch.bfloat16)[0].equal(torch.cat(expected))


def test_blocks_come_back_as_they_were_wherever_they_go(cache: DynamicCache, layout: Layout) -> None:
    values = torch.zeros(2, 2, layout.block_bytes, dtype=torch.uint8)
    planes = layout.empty(2, 8)
    for row in range(2):
        layout.gather(cache, row, 0, values[row])
        for block in (1, 0):
            layout.scatter(values[row, block : block + 1], row, block, planes)
    found = layout.cache_of(planes)
    assert found.get_seq_length() == 8
    for there, here in zip(found.layers, cache.layers, strict=True):
        assert there.keys.equal(here.keys[:, :, :8])
        assert there.values.equal(here.values[:, :, :8])
    found.update(torch.zeros(2, 3, 1, 6).bfloat16(), torch.zeros(2, 3, 1, 4).bfloat16(), 0)
    assert found.get_seq_length() == 9


def test_its_shapes_tell_it_from_others(layout: Layout) -> None:
    others = [cache_of((3, 6, 4)), cache_of((3, 4, 6), (1, 2, 2)), cache_of((3, 6, 4), (1, 2, 2), dtype=torch.float16)]
    texts = {layout.shapes, *(layout_of_cache(cache, BLOCK_TOKENS).shapes for cache in others)}
    assert len(texts) == 4
    assert layout_of_cache(cache_of((3, 6, 4), (1, 2, 2), rows=1, tokens=5), BLOCK_TOKENS).shapes == layout.shapes


def test_a_cache_of_other_sequences_or_models_is_refused(layout: Layout) -> None:
    layout.check(cache_of((3, 6, 4), (1, 2, 2)), rows=2, tokens=11)
    for other in (cache_of((3, 6, 4), (1, 2, 3)), cache_of((3, 6, 4)), cache_of((3, 6, 4), (1, 2, 2), tokens=10), cache_of(rows=1)):
        with pytest.raises(InvalidArgument, match="of the cache has shape"):
            layout.check(other, rows=2, tokens=11)


def test_element_types_are_one() -> None:
    cache = cache_of((1, 2, 2))
    cache.update(torch.zeros(2, 1, 11, 2), torch.zeros(2, 1, 11, 2), 1)
    with pytest.raises(InvalidArgument, match="2 element types"):
        layout_of_cache(cache, BLOCK_TOKENS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_model_with_keys_that_depend_on_later_tokens_is_rejected(kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0} | (factors if kind == "longrope" else {})
    with pytest.raises(InvalidArgument, match=f"by {kind}"):
        layout_of(llama(rope_parameters=rope), BLOCK_TOKENS)


def test_rope_per_layer_type_that_depends_on_length_is_rejected() -> None:
    model = llama()
    assert len(layout_of(model, BLOCK_TOKENS).planes) == 6
    model.model.rotary_emb.rope_type = {"full_attention": "dynamic", "sliding_attention": "default"}
    with pytest.raises(InvalidArgument, match="by dynamic"):
        layout_of(model, BLOCK_TOKENS)


def namespace(model: Any, dtype: torch.dtype = torch.float32, shapes: str = "s", name: str = "", block_tokens: int = 16) -> Namespace:
    return namespace_of(model, dtype, shapes, name=name, block_tokens=block_tokens)


def test_the_same_model_is_the_same_wherever_it_was_loaded_from() -> None:
    here, there = llama(), llama()
    there.config._name_or_path = "/another/folder"
    assert namespace(here) == namespace(there)
    assert namespace(here).model == "LlamaForCausalLM"
    assert namespace(here, name="chat").model == "chat"


def test_a_change_of_any_parameter_is_seen() -> None:
    model = llama()
    before = {weights_id(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter += 0.5
        assert weights_id(model) not in before
        before.add(weights_id(model))


def test_an_adapter_is_seen() -> None:
    model = llama()
    before = weights_id(model)
    model.model.layers[0].self_attn.q_proj.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2, 2)))
    assert weights_id(model) != before


def test_what_is_not_loaded_cannot_be_told() -> None:
    with pytest.raises(InvalidArgument, match=r"embed_tokens\.weight is not loaded"):
        weights_id(llama().to("meta"))


def test_whatever_changes_bytes_is_in_the_namespace() -> None:
    model = llama()
    others = [
        namespace(model),
        namespace(model, dtype=torch.bfloat16),
        namespace(model, shapes="t"),
        namespace(model, block_tokens=32),
        namespace(llama(seed=1)),
        namespace(llama(rms_norm_eps=1e-3)),
        namespace(llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        namespace(llama(attn_implementation="eager")),
    ]
    assert len({other.id for other in others}) == len(others)
