"""Loads of a step that needs them, layer by layer: the engine computes with a layer's part of the blocks while loaders bring those of the
layers behind it.

Only of blocks that lie on this host, of which parts can be read. All others come whole, for all layers at once.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.engines.vllm.layout import LayerPools


class Reached:
    """How far the loads of a step are. Loaders tell, the engine's thread waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._layers: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """A load of this request begins: nothing of it is there."""
        with self._changed:
            self._layers[request_id] = 0

    def reach(self, request_id: str, layers: int) -> None:
        """So many layers of it are there, from the first one on, or will not come."""
        with self._changed:
            self._layers[request_id] = layers
            self._changed.notify_all()

    def end(self, request_id: str) -> None:
        """It is over, whatever came of it."""
        with self._changed:
            del self._layers[request_id]
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Come back when no load that has begun is still to bring this layer."""
        if self._layers:  # only the thread that begins loads waits: none begins meanwhile
            with self._changed:
                self._changed.wait_for(lambda: all(layers > layer for layers in self._layers.values()))

    def wait_all(self) -> None:
        """Come back when all loads are over."""
        if self._layers:
            with self._changed:
                self._changed.wait_for(lambda: not self._layers)


def fetch_by_layer(
    client: Client, keys: list[bytes], pools: LayerPools, blocks: Sequence[int], until_s: float, reach: Callable[[int], None]
) -> int:
    """How many of `blocks`, from the first on, have all of their value now. `reach` is called with the number of layers that are there.

    The first layer comes alone, then as many at a time as are there: the engine computes with those meanwhile, and to look at a block once
    a layer takes as long again as to copy it. What is no longer on this host comes whole each time. Raises what `Client.get_ranges_into`
    does.
    """
    there, reached = len(keys), 0
    while reached < pools.layer_count:
        layers = range(reached, min(max(1, 2 * reached), pools.layer_count))
        parts = [pools.layer_pieces(layer, blocks[:there]) for layer in layers]
        offsets = [offset for offset, pieces in parts for _ in pieces]
        left_s = until_s - time.monotonic()
        if left_s > 0:
            into = [_halves(piece) for _, pieces in parts for piece in pieces]
            results = client.get_ranges_into(keys[:there] * len(layers), offsets, into, deadline_s=left_s)
        else:
            results = [None] * there
        there = min((place % there for place, result in enumerate(results) if not isinstance(result, int)), default=there)
        reached = layers.stop
        reach(reached)
    return there


def _halves(piece: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """A buffer in one part is copied without the GIL; to have it back from the engine's thread takes up to 5 ms, for each piece."""
    middle = len(piece) // 2
    return [piece[:middle], piece[middle:]]
