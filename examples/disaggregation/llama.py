"""A small real Llama, and the part of it that one rank of a sharded executor holds.

The layers are those of `transformers`. A part is built with fewer heads and a narrower MLP (Megatron's tensor parallelism) and with a
range of the layers (pipeline parallelism); its weights are read from the file slice by slice, so that no rank ever holds the rest.

It knows nothing of blocks, pools or other processes: the cache and the sum over ranks are passed in.

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (columns of q, k, v, gate and up; rows of o and down, summed).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

WEIGHTS_FILE: Final = "model.safetensors"
Tensor: TypeAlias = torch.Tensor
Sum = Callable[[Tensor], Tensor]
"""Adds up what the ranks of a tensor-parallel group hold; every rank gets the same result."""


class Cache(Protocol):
    """KV cache as the attention of a layer uses it; `transformers` has the same method."""

    def update(self, keys: Tensor, values: Tensor, layer: int, **_of_the_pass: Any) -> tuple[Tensor, Tensor]:
        """Append [1, heads, tokens, head_dim] of a layer; return all keys and values of that layer, including the new ones.

        Other arguments of the forward pass are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of the model: layers [start, stop), and tensor-parallel rank `tp_rank` of `tp`."""

    layers: range
    tp: int = 1
    tp_rank: int = 0


def configuration(**changes: Any) -> LlamaConfig:
    """Grouped-query attention with two KV heads for eight query heads: with four ranks each KV head lies on two of them."""
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Plain matmul and softmax: a faster kernel may choose another order of summing for another shape.
    return LlamaConfig(**(sizes | changes), attn_implementation="eager")


def seeded(config: LlamaConfig, *, seed: int) -> LlamaForCausalLM:
    """The whole model with random weights, float32 on the CPU."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def whole(folder: Path) -> LlamaForCausalLM:
    """The whole model that was saved (`save_pretrained`) in `folder`, float32."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, attn_implementation="eager"))
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return model.eval()


def exact(folder: Path) -> LlamaForCausalLM:
    """The same model in float64. The norms and the softmax of `transformers` would go through float32: here they do not."""
    model = whole(folder).double()
    model.set_attn_implementation("sdpa")
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, LlamaRMSNorm):
                setattr(module, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64))
                getattr(module, name).weight = norm.weight
    return model


class SummedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer whose input is spread over the ranks: each multiplies its columns of the weight, and the products are added up."""

    def __init__(self, inputs: int, outputs: int, add: Sum) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))
        self._add = add

    def forward(self, values: Tensor) -> Tensor:
        return self._add(torch.nn.functional.linear(values, self.weight))


class LlamaPart(torch.nn.Module):  # type: ignore[misc]
    """One rank's part of the model in `folder`, float32. The first stage embeds tokens, the last one gives logits."""

    def __init__(self, folder: Path, part: Part, add: Sum) -> None:
        super().__init__()
        config = LlamaConfig.from_pretrained(folder, attn_implementation="eager")
        self.hidden_size = config.hidden_size
        self.is_first = part.layers.start == 0
        self.is_last = part.layers.stop == config.num_hidden_layers
        self.layers = torch.nn.ModuleDict({str(layer): _narrow_layer(config, part, layer, add) for layer in part.layers})
        self.rotary = LlamaRotaryEmbedding(config)
        if self.is_first:
            self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        if self.is_last:
            self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.load_state_dict(_read_part(folder, config, part, self), strict=True)
        self.eval()

    def forward(self, values: Tensor, cache: Cache, *, first_token: int, on_layer: Callable[[int], None] = lambda layer: None) -> Tensor:
        """`values`: token ids [tokens] in the first stage, else the hidden states [1, tokens, hidden] of the stage before. They are
        tokens [first_token, first_token + tokens) of a sequence whose earlier ones are in `cache`. Returns hidden states, or, from the
        last stage, logits [tokens, vocabulary]. `on_layer` is called when a layer's keys and values are in the cache for good."""
        with torch.inference_mode():
            hidden = self.embed(values)[None] if self.is_first else values
            tokens = hidden.shape[1]
            rotation = self.rotary(hidden, position_ids=torch.arange(first_token, first_token + tokens)[None])
            mask = causal_mask(tokens, first_token)
            for name, layer in self.layers.items():
                hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation, cache=cache)
                on_layer(int(name))
            return self.head(self.norm(hidden))[0] if self.is_last else hidden


def causal_mask(tokens: int, first_token: int) -> Tensor:
    """[1, 1, tokens, first_token + tokens] to be added to scores: token i sees those up to itself."""
    mask = torch.full((tokens, first_token + tokens), torch.finfo(torch.float32).min)
    return mask.triu(first_token + 1)[None, None]


def _narrow_layer(config: LlamaConfig, part: Part, layer: int, add: Sum) -> LlamaDecoderLayer:
    narrow = LlamaConfig(**config.to_dict(), attn_implementation="eager")
    narrow.num_attention_heads = config.num_attention_heads // part.tp
    narrow.num_key_value_heads = len(kv_heads(config, part))
    narrow.intermediate_size = config.intermediate_size // part.tp
    module = LlamaDecoderLayer(narrow, layer)
    module.self_attn.o_proj = SummedLinear(narrow.num_attention_heads * config.head_dim, config.hidden_size, add)
    module.mlp.down_proj = SummedLinear(narrow.intermediate_size, config.hidden_size, add)
    return module


def kv_heads(config: LlamaConfig, part: Part) -> range:
    """The KV heads of a part. With more ranks than KV heads several ranks hold the same one."""
    first = part.tp_rank * config.num_key_value_heads // part.tp
    return range(first, first + max(1, config.num_key_value_heads // part.tp))


def _read_part(folder: Path, config: LlamaConfig, part: Part, module: LlamaPart) -> dict[str, Tensor]:
    """The part's weights by the names of `module`, each slice read from the file separately."""
    heads = config.num_attention_heads // part.tp * config.head_dim
    kv = kv_heads(config, part)
    wide = config.intermediate_size // part.tp
    rows = {
        "q_proj": slice(part.tp_rank * heads, (part.tp_rank + 1) * heads),
        "k_proj": slice(kv.start * config.head_dim, kv.stop * config.head_dim),
        "v_proj": slice(kv.start * config.head_dim, kv.stop * config.head_dim),
        "gate_proj": slice(part.tp_rank * wide, (part.tp_rank + 1) * wide),
        "up_proj": slice(part.tp_rank * wide, (part.tp_rank + 1) * wide),
    }
    columns = {"o_proj": rows["q_proj"], "down_proj": rows["up_proj"]}
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
    found = {}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for name in module.state_dict():
            matrix = name.rpartition(".")[0].rpartition(".")[2]
            weight = file.get_slice(names.get(name, f"model.{name}"))
            found[name] = weight[:, columns[matrix]] if matrix in columns else weight[rows[matrix]] if matrix in rows else weight[:]
    return found
