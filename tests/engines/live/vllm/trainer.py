"""A trainer that changes weights in the memory of vLLM's ranks: an extension of its worker, called by `collective_rpc`."""

from typing import Any

import torch


class Trainer:
    """Of vLLM's worker, by `worker_extension_cls`."""

    model_runner: Any

    def train(self, seed: int) -> None:
        """Add to each parameter noise as large as a tenth of it, the same for equal seeds."""
        numbers = torch.Generator().manual_seed(int(seed))
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float32)
                parameter.add_((0.1 * noise * parameter.std()).to(parameter.dtype))
