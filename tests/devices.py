"""Device of tests that a GPU serves: `cuda:0`, or the CPU where there is none. `make gpu` runs those marked gpu."""

from typing import Final

import pytest
import torch

HAS_CUDA: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda:0" if HAS_CUDA else "cpu")

needs_cuda: Final = pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA")


def keep_busy(cycles: int = 300_000_000) -> None:
    """Launch a kernel that runs for a few tenths of a second on the current stream; on the CPU there is none."""
    if HAS_CUDA:
        torch.cuda._sleep(cycles)
