"""Communication between the ranks of one executor: sums over a tensor-parallel group, hidden states from stage to stage.

This is the engine's own business, by torch.distributed and gloo on the loopback; the KV cache goes another way.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from disaggregation.llama import Tensor

from kvstore.kvcache.layouts.parallel import Parallel

TIMEOUT: Final = timedelta(seconds=30)
"""For a peer to take part: one that has died must not hold the others."""


class Mesh:
    """One rank's place among those of its executor, who meet at `meeting`, a file that is not there yet."""

    def __init__(self, parallel: Parallel, rank: int, meeting: Path) -> None:
        place = parallel.coordinates(rank)
        self._group: dist.ProcessGroup | None = None
        self._before = parallel.rank_of(pp=place.pp - 1, tp=place.tp, cp=0) if place.pp else -1
        self._after = parallel.rank_of(pp=place.pp + 1, tp=place.tp, cp=0) if place.pp + 1 < parallel.pp else -1
        self._is_met = parallel.ranks > 1
        if not self._is_met:
            return
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=parallel.ranks, timeout=TIMEOUT)
        for stage in range(parallel.pp):  # every rank has to take part in making every group
            group = dist.new_group([parallel.rank_of(pp=stage, tp=tp, cp=0) for tp in range(parallel.tp)], timeout=TIMEOUT)
            if stage == place.pp and parallel.tp > 1:
                self._group = group

    def add(self, values: Tensor) -> Tensor:
        """The sum over the tensor-parallel group, in place; the same bits on all its ranks."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def receive(self, *shape: int) -> Tensor:
        """Hidden states of the stage before."""
        values = torch.empty(shape)
        dist.recv(values, self._before)
        return values

    def send(self, values: Tensor) -> None:
        """Hidden states to the stage behind."""
        dist.send(values.contiguous(), self._after)

    def close(self) -> None:
        if self._is_met:
            dist.destroy_process_group()
