"""Promises of kvcache/models/spec.py, by what transformers really keeps. Here, since it takes a process seconds to load transformers."""

import torch
import transformers

from kvstore.kvcache.models.spec import CacheSpec


def test_the_cache_that_transformers_keeps_has_these_sizes() -> None:
    """After 20 tokens, in models that are built but not trained. Between two steps it keeps a token less of a window than the step saw."""
    shape = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "dtype": "float32",
    }
    configs = [
        transformers.LlamaConfig(**shape, num_key_value_heads=2),
        transformers.Gemma2Config(**shape, num_key_value_heads=1, head_dim=32, sliding_window=8),
        transformers.Qwen3Config(**shape, num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=3),
    ]
    for config in configs:
        spec = CacheSpec.from_config(config.to_dict())
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(config)
            layers = model(torch.arange(20)[None], use_cache=True).cache.layers
        found_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        assert found_bytes == spec.sequence_bytes(20) - spec.bytes_per_token / spec.layers * spec.windowed_layers
