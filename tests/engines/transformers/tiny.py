"""Small models with random weights, the same in each process. `python -m tests.engines.transformers.tiny MASTER` is another process: it
loads a prompt's prefix, generates, and prints as JSON how many tokens it found, the tokens, and the logits of each."""

import json
import sys
from typing import Any, Final

import torch
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvstore.client import Client
from kvstore.engines.transformers.prefix_store import PrefixStore

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT: Final = [(7 * i * i + 3 * i) % 96 for i in range(70)]
NEW_TOKENS: Final = 12


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()


def mistral() -> Any:
    """Whose window is shorter than the prompt."""
    torch.manual_seed(1)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=24)).eval()


def gemma() -> Any:
    """Whose layers take turns: a window, and none."""
    torch.manual_seed(2)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=24, query_pre_attn_scalar=8)).eval()


def mamba() -> Any:
    """Return a model without keys and values."""
    return MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4))


def llava() -> Any:
    """Return a model of pictures and text. Token 95 stands for a picture."""
    torch.manual_seed(3)
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SHAPE), image_token_index=95, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


class AdaptedLinear(torch.nn.Module):  # type: ignore[misc]
    """Layer with two LoRAs and the interface of PEFT's layers. Stands for PEFT, which the tests do not install."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapter, self.is_disabled = "a", False
        self.scaling = {"a": 1.0, "b": 1.0}
        made = torch.Generator().manual_seed(4)
        self.lora = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.randn(base.weight.shape, generator=made) * 0.3) for name in "ab"}
        )

    @property
    def active_adapters(self) -> list[str]:
        return [self.active_adapter]

    @property
    def disable_adapters(self) -> bool:
        return self.is_disabled

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        plain = self.base_layer(given)
        return plain if self.is_disabled else plain + given @ self.lora[self.active_adapter].T * self.scaling[self.active_adapter]


def generate(model: Any, input_ids: torch.Tensor, cache: DynamicCache | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows, tokens], the prompt's included, and the logits of the new ones, [new tokens, rows, vocabulary], greedily."""
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return output.sequences, torch.stack(output.logits)


def main(master: str) -> None:
    model, input_ids = llama(), torch.tensor([PROMPT])
    with Client(master) as client, PrefixStore(client, model) as prefixes:
        cache = prefixes.load(input_ids)
        found = cache.get_seq_length()
        tokens, logits = generate(model, input_ids, cache)
        print(json.dumps([found, tokens.tolist(), logits.tolist()]))


if __name__ == "__main__":
    main(sys.argv[1])
