"""A model with random weights and a byte-pair tokenizer, made on the spot, or a LoRA for the tiny one.

`python -m tests.engines.live.tiny_model FOLDER SIZE`, or `FOLDER adapter SEED`; `FOLDER weights SEED` overwrites those of a model.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Blip2Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from tests.engines.live.pictures import IMAGE_PIXELS, IMAGE_TOKENS

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
    "one_head": FOUR_LAYERS | {"num_key_value_heads": 1, "head_dim": 64},
    "heads": FOUR_LAYERS | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32},
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
    "mamba": FOUR_LAYERS
    | {
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "position_embedding_type": "rope",
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
state of a short convolution (LFM 2) or of Mamba 2 (Granite 4); 16 layers of 174 million parameters, for figures."""
SIZES["sliding"] = SIZES["windows"] | {"layer_types": ["sliding_attention"] * 4}
"""No layer of it attends to all tokens."""
CHAT_TEMPLATE: Final = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if style is defined %}style: {{ style }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['reasoning_content'] %}<{{ m['reasoning_content'] }}>{% endif %}{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""With tools, their calls and answers, reasoning, and an argument of its own, `style`."""
IMAGE_TOKEN: Final = "<image>"
FAMILIES: Final[dict[str, type[PreTrainedConfig]]] = {
    "windows": Gemma3TextConfig,
    "sliding": Gemma3TextConfig,
    "states": Lfm2Config,
    "mamba": GraniteMoeHybridConfig,
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
    fast.chat_template = CHAT_TEMPLATE
    if size == "images":
        fast.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    if size == "images":
        make_with_eyes(folder, fast)
        return
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


def make_with_eyes(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write BLIP-2 with OPT, and how it takes images, into `folder`: an image is IMAGE_TOKENS tokens before the prompt."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=small | {"image_size": IMAGE_PIXELS, "patch_size": 14},
        qformer_config=small | {"encoder_hidden_size": 64, "vocab_size": 64},
        text_config={
            "model_type": "opt",
            "vocab_size": 2 * VOCABULARY,
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 2048,
            "init_std": 0.1,
        },
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        initializer_range=0.5,
        dtype="float32",
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder, safe_serialization=True)
    side = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "BlipImageProcessor", "size": side}))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))


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


def make_weights(folder: Path, seed: int) -> None:
    """Write other random weights over those of the model in `folder`."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    path, what, *seed = sys.argv[1:]
    if what == "adapter":
        make_adapter(Path(path), int(seed[0]))
    elif what == "weights":
        make_weights(Path(path), int(seed[0]))
    else:
        make(Path(path), what)
