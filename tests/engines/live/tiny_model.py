"""A Llama with random weights and a byte-pair tokenizer, made on the spot: `python -m tests.engines.live.tiny_model FOLDER SIZE`."""

import sys
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY: Final = 1024
SIZES: Final = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.06,
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
"""4 layers with a block of 64 KiB a layer and 64 tokens in float32; 16 layers of 174 million parameters, for figures."""


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
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16_384,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
        **SIZES[size],
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
