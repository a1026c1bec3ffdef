"""Some seconds of training, so that the small Llama knows what a story is: the perplexity of random weights would say nothing."""

import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from disaggregation.llama import Tensor, configuration, seeded
from disaggregation.story import stories

LEARNING_RATE: Final = 6e-3
ROW_TOKENS: Final = 512
TEXT_TOKENS: Final = 200_000
TEXT_SEED: Final = 1000
"""Other stories than those that the model is asked about."""


def trained(folder: Path, *, seed: int, steps: int) -> Path:
    """Return the folder of the model, trained from random weights for so many steps; an existing one is reused."""
    recipe = (
        f"{configuration().to_json_string()} {seed} {steps} {LEARNING_RATE} {ROW_TOKENS} {TEXT_TOKENS} {TEXT_SEED} {stories(500, seed=0)}"
    )
    place = folder / f"llama-{steps}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not place.exists():
        partial = folder / f"{place.name}.{os.getpid()}"
        _train(seed, steps).save_pretrained(partial)
        try:
            partial.rename(place)
        except OSError:  # another program was quicker
            shutil.rmtree(partial)
    return place


def _train(seed: int, steps: int) -> torch.nn.Module:
    model = seeded(configuration(), seed=seed).train()
    model.set_attn_implementation("sdpa")  # four times as fast; bits are not compared here
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for row in _rows(seed, steps):
        optimizer.zero_grad()
        model(row, labels=row, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def _rows(seed: int, steps: int) -> Iterator[Tensor]:
    """[1, ROW_TOKENS] from anywhere in the text."""
    rng = random.Random(seed)
    text = torch.tensor(stories(TEXT_TOKENS, seed=TEXT_SEED))
    for _ in range(steps):
        start = rng.randrange(len(text) - ROW_TOKENS)
        yield text[None, start : start + ROW_TOKENS]
