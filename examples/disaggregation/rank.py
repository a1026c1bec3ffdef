"""One rank of an executor, in a process of its own: its part of the model, its pool of blocks, and its share of a hand-over.

The program sends token ids and receives logits, and figures for the tables. The KV cache goes from rank to rank.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from disaggregation.llama import LlamaPart, Part
from disaggregation.mesh import Mesh
from disaggregation.paged import PagedCache, Pool, new_cache
from numpy.typing import NDArray

from kvstore.client.sync import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.parts import ValueShape
from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RemoteExecutor
from kvstore.handover.handles import ReceiveHandle, SendHandle
from kvstore.handover.prefix import RankPrefixStore
from kvstore.handover.transceiver import CacheTransceiver
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.settings import Size
from kvstore.transfer.engine import TransferEngine

SETTINGS = HandoverSettings(min_layer_batch_bytes=Size(1))  # the model is so small that all of its layers would wait for one another


class Rank:
    """A request is known by its id from `begin` to `end`. Its tokens are appended by `forward`, or handed over by another executor."""

    def __init__(self, *, name: str, rank: int, layout: CacheLayout, weights: str, meeting: str, master: str = "") -> None:
        torch.set_num_threads(1)  # ranks share the cores: threads that spin for one another would take most of them
        place = layout.parallel.coordinates(rank)
        part = Part(layers=layout.rank_layers(rank), tp=layout.parallel.tp, tp_rank=place.tp)
        self._layout = layout
        self._mesh = Mesh(layout.parallel, rank, Path(meeting))
        self._answers = place.tp == 0
        self._model = LlamaPart(Path(weights), part, self._mesh.add)
        self._engine = TransferEngine(f"{name}-{rank}")
        self._region = self._engine.allocate(layout.region_bytes(rank, 0))
        self._pool = Pool(layout, rank, self._region)
        self._client = Client(master) if master else None
        self._store = _shared(self._client, layout, rank) if self._client else None
        prefixes = RankPrefixStore(self._store, self._pool.values) if self._store else None
        self._transceiver = CacheTransceiver(layout, rank, [self._region], self._engine, SETTINGS, store=prefixes)
        self._source: RemoteExecutor
        self._caches: dict[bytes, PagedCache] = {}
        self._moves: dict[bytes, Any] = {}

    # --- computing ---

    def begin(self, request: bytes, capacity_tokens: int) -> None:
        self._caches[request] = new_cache(self._pool, capacity_tokens=capacity_tokens)

    def forward(self, request: bytes, token_ids: list[int]) -> NDArray[np.float32] | None:
        """Append tokens; one rank of the last stage returns their logits [tokens, vocabulary].

        Layers of a request that is being sent are sent as they are computed."""
        cache, move = self._caches[request], self._moves.get(request)
        values = torch.tensor(token_ids)
        if not self._model.is_first:
            values = self._mesh.receive(1, len(token_ids), self._model.hidden_size)
        on_layer = (lambda layer: None) if move is None else move.layer_ready
        out = self._model(values, cache, first_token=cache.tokens, on_layer=on_layer)
        cache.tokens += len(token_ids)
        if self._model.is_last:
            return out.numpy() if self._answers else None
        self._mesh.send(out)
        return None

    def end(self, request: bytes) -> None:
        self._caches.pop(request).close()

    # --- hand-over ---

    def describe(self) -> bytes:
        return self._transceiver.describe()

    def join(self, descriptions: list[bytes]) -> None:
        """The ranks of this executor."""
        self._transceiver.join(descriptions)

    def connect(self, descriptions: list[bytes]) -> None:
        """The executor from which requests will come."""
        self._source = self._transceiver.connect(descriptions)

    def send(self, request: bytes, tokens: int) -> None:
        """Send the cache, and all that `forward` appends up to `tokens`, to the receiving ranks."""
        self._moves[request] = self._transceiver.send(request, self._caches[request].blocks, tokens=tokens)

    def receive(self, request: bytes, prompt: list[int], uses_store: bool) -> None:
        """Take the cache of the prompt: from the store as far as it is there, and the rest from the executor that was connected."""
        blocks = self._caches[request].blocks
        token_ids = prompt if uses_store else None
        self._moves[request] = self._transceiver.receive(request, blocks, tokens=len(prompt), source=self._source, token_ids=token_ids)

    def wait_sent(self, request: bytes) -> tuple[int, int]:
        """Until every receiver has all; bytes that this rank gave, and how many of them before it had computed its last layer."""
        move: SendHandle = self._moves.pop(request)
        move.wait()
        return move.sent_bytes, move.overlap_bytes

    def wait_received(self, request: bytes, tokens: int) -> tuple[int, int]:
        """Until the cache is here; bytes that came from the other executor, and tokens that came from the store."""
        move: ReceiveHandle = self._moves.pop(request)
        move.wait()
        self._caches[request].tokens = tokens
        return move.received_bytes, move.store_tokens

    # --- the store ---

    def stored_blocks(self, token_ids: list[int]) -> int:
        """Return the number of blocks at the beginning of a prompt that this rank would find in the store."""
        assert self._store is not None
        return self._store.match_prefix(token_ids)

    def put(self, request: bytes, token_ids: list[int]) -> None:
        """Share the full blocks of a request."""
        assert self._store is not None
        self._store.put_tensor(token_ids, self._caches[request].full_blocks())

    def fetch(self, request: bytes, token_ids: list[int]) -> None:
        """Take the blocks of these tokens, which are in the store."""
        assert self._store is not None
        cache = self._caches[request]
        count = len(token_ids) // self._layout.spec.block_tokens
        blocks = np.array(cache.blocks[:count])
        assert RankPrefixStore(self._store, self._pool.values).fetch(token_ids, blocks, deadline_s=10) == count, "a block has gone since"
        cache.tokens = len(token_ids)

    # --- facts for the tables ---

    def contents(self, request: bytes) -> NDArray[Any]:
        """Return this rank's part of a request, [layer, kv, head, ...]: values by token, or records by block."""
        found: NDArray[Any] = self._caches[request].contents().numpy()
        return found

    def close(self) -> None:
        self._transceiver.close()
        self._engine.close()
        self._mesh.close()
        if self._client is not None:
            self._client.close()


def _shared(client: Client, layout: CacheLayout, rank: int) -> TensorCache:
    """A value of the store holds one KV head in half of the layers: so much every rank of two stages holds."""
    spec = layout.spec
    namespace = Namespace(model=spec.model, dtype=spec.dtype, block_tokens=spec.block_tokens)
    return TensorCache(client, spec, namespace, parallel=layout.parallel, rank=rank, values=ValueShape(layers=spec.layers // 2))
