"""The reference: one process with the whole model, run as `transformers` runs it, in float32 and in float64. It trains it, too."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from disaggregation.llama import exact, whole
from disaggregation.small_model import trained
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


class WholeModel:
    """Served to the program by workers.py."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def train(self, folder: str, seed: int, steps: int) -> str:
        """Train the model and return its folder."""
        weights = trained(Path(folder), seed=seed, steps=steps)
        self._single, self._exact = whole(weights), exact(weights)
        return str(weights)

    def logits(self, chunks: list[list[int]]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """[tokens, vocabulary] in float32 and in float64, of tokens given to the model chunk by chunk, as executors give them."""
        return _logits(self._single, chunks), _logits(self._exact, chunks)

    def close(self) -> None:
        pass


def _logits(model: LlamaForCausalLM, chunks: list[list[int]]) -> NDArray[Any]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        found: NDArray[Any] = torch.cat([model(torch.tensor([chunk]), cache=cache).logits[0] for chunk in chunks]).numpy()
    return found
