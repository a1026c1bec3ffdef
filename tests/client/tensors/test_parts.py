"""Promises of parts.py."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.tensors.parts import ValuePart, ValueShape, value_parts
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace

SPEC = CacheSpec(layers=6, kv_heads=4, head_dim=8, dtype="float32")
BASE = Namespace(model="m", dtype="float32", block_tokens=16)


def parts_of(layers: range, heads: range, *, spec: CacheSpec = SPEC, each: tuple[int, int] = (1, 0)) -> tuple[ValuePart, ...]:
    return value_parts(spec, BASE, layers=layers, heads=heads, shape=ValueShape(*each))


@given(st.data())
def test_parts_cover_the_shard_once(data: st.DataObject) -> None:
    model_layers, model_heads = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 2, 4, 6, 12]))
    heads_each = data.draw(st.sampled_from([each for each in range(1, model_heads + 1) if model_heads % each == 0]))
    layers_each = data.draw(st.integers(0, model_layers))
    spec = replace(SPEC, layers=model_layers, kv_heads=model_heads, heads=model_heads)
    start, stop = sorted(data.draw(st.lists(st.integers(0, model_layers), min_size=2, max_size=2, unique=True)))
    first, end = sorted(data.draw(st.lists(st.integers(0, model_heads), min_size=2, max_size=2, unique=True)))
    model = np.arange(model_layers * model_heads).reshape(model_layers, model_heads)
    shard = np.full((stop - start, end - first), -1)
    for part in parts_of(range(start, stop), range(first, end), spec=spec, each=(heads_each, layers_each)):
        of_layers, of_heads = part.namespace.layers, part.namespace.heads
        assert of_layers is not None
        assert of_heads is not None
        assert of_heads[1] == model_heads // heads_each
        assert part.model_layers == range(*of_layers)
        value = model[of_layers[0] : of_layers[1], of_heads[0] * heads_each : (of_heads[0] + 1) * heads_each]
        assert value.shape == (part.layer_count, part.head_count)
        common = value[part.value_layers, part.value_heads]
        assert part.is_whole == (common.size == value.size)
        assert (shard[part.own_layers, part.own_heads] == -1).all()
        shard[part.own_layers, part.own_heads] = common
    assert (shard == model[start:stop, first:end]).all()


def test_whole_values_are_independent_of_sharding() -> None:
    """The namespaces of TP 2 x PP 3 together are those of one rank."""
    sharded = {
        part.namespace
        for stage, shard in itertools.product(range(3), range(2))
        for part in parts_of(range(2 * stage, 2 * stage + 2), range(2 * shard, 2 * shard + 2), each=(2, 2))
    }
    assert sharded == {part.namespace for part in parts_of(range(6), range(4), each=(2, 2))}
    assert len(sharded) == 6
