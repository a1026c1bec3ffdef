"""A model with random weights and a byte-pair tokenizer, made on the spot, or a LoRA for the tiny one.

`python -m tests.engines.live.tiny_model FOLDER SIZE`, or `FOLDER adapter SEED`.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

VOCABULARY: Final = 1024
ADAPTER_RANK: Final = 8
FOUR_LAYERS: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "tiny": FOUR_LAYERS | {"head_dim": 64},
    "windows": FOUR_LAYERS
    | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "states": FOUR_LAYERS
    | {
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_dim": 256,
        "block_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": False,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "initializer_range": 0.04,
    },
}
"""4 layers with a block of 64 KiB a layer and 64 tokens in float32; as many, every other with a window of 64 tokens (Gemma 3), or with the
state of a short convolution (LFM 2); 16 layers of 174 million parameters, for figures."""
SIZES["sliding"] = SIZES["windows"] | {"layer_types": ["sliding_attention"] * 4}
"""No layer of it attends to all tokens."""
FAMILIES: Final[dict[str, type[PreTrainedConfig]]] = {
    "windows": Gemma3TextConfig,
    "sliding": Gemma3TextConfig,
    "states": Lfm2Config,
}
"""Llama where nothing else is said."""


def make(folder: Path, size: str) -> None:
    """Write the model and its tokenizer into `folder`. The same each time."""
    text = [line for page in sorted(Path(__file__).parent.glob("*.py")) for line in page.read_text().splitlines()]
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = FAMILIES.get(size, LlamaConfig)(
        vocab_size=VOCABULARY,
        max_position_embeddings=16_384,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
        **SIZES[size],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, safe_serialization=True)


def make_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA for the model "tiny", of random weights as large as the model's: what it is applied to makes other tokens."""
    size = SIZES["tiny"]
    numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(size["num_hidden_layers"]):
        for name, heads in (("k_proj", size["num_key_value_heads"]), ("v_proj", size["num_key_value_heads"])):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(ADAPTER_RANK, size["hidden_size"], generator=numbers) * 0.06
            weights[f"{module}.lora_B.weight"] = torch.randn(heads * size["head_dim"], ADAPTER_RANK, generator=numbers)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    path, what, *seed = sys.argv[1:]
    if what == "adapter":
        make_adapter(Path(path), int(seed[0]))
    else:
        make(Path(path), what)
