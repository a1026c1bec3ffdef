"""Promises of identity.py: models that would make other bytes are told apart, and nothing else is."""

from typing import Any

import pytest
import torch

from kvstore.engines.transformers.identity import namespace_of, weights_id
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from tests.engines.transformers.tiny import llama


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
        namespace(llama(attn_implementation="eager")),
    ]
    assert len({other.id for other in others}) == len(others)
