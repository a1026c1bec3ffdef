"""A LoRA adapter with random weights for the tiny model, in PEFT's form: `tiny_lora.py FOLDER [SEED]`, run in SGLang's environment."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
HIDDEN, INTERMEDIATE, LAYERS = 256, 512, 4
"""Of the tiny model."""


def make(folder: Path, seed: int) -> None:
    """Write the adapter into `folder`. The same for each seed, and strong enough to change what is said."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, INTERMEDIATE, generator=random)
        weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    shape = {"r": RANK, "lora_alpha": RANK, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM"} | shape))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
