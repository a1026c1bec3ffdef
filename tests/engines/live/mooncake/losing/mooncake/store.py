"""kvstore under Mooncake's name, with a fault: objects vanish between the engine's lookup and its first load."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.engines.mooncake.store import MooncakeDistributedStore as Store
from kvstore.engines.mooncake.store import ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]

KEPT: Final = 2
"""Of the objects of the first load, so many are there still."""


class MooncakeDistributedStore(Store):
    """Removes objects once, before it loads them, and says so in the file that TEST_LOST names."""

    def __init__(self) -> None:
        super().__init__()
        self._has_lost = False

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        if not self._has_lost:
            self._has_lost = True
            codes = self.batch_remove(keys[KEPT:], force=True)
            Path(os.environ["TEST_LOST"]).write_text(json.dumps(codes))
        return super().batch_get_into_multi_buffers(keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node)
