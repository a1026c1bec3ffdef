"""Executors of real transceivers with real engines in this process, for tests of the hand-over."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RemoteExecutor
from kvstore.handover.handles import ReceiveHandle, SendHandle
from kvstore.handover.transceiver import CacheTransceiver
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.peer import Peer

SPEC = CacheSpec(layers=4, kv_heads=4, head_dim=8, dtype="float16", block_tokens=16)


def layout_of(spec: CacheSpec = SPEC, *, tp: int = 1, pp: int = 1, pool_blocks: int = 32, order: str = "HND", **sizes: Any) -> CacheLayout:
    return CacheLayout(spec=spec, parallel=Parallel(tp=tp, pp=pp, **sizes), pool_blocks=pool_blocks, order=order)


DIRECT = {"direct_min_bytes": Size(0)}
GATHERED = {"direct_min_bytes": Size(1 << 30), "staging_part_bytes": Size(4096)}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "push": ({"way": "push", **DIRECT}, {}),
    "push-gathered": ({"way": "push", **GATHERED}, {}),
    "pull": ({"way": "pull", **DIRECT}, {"transports": "shm,tcp"}),
    "pull-gathered": ({"way": "pull", **GATHERED}, {"transports": "shm", "is_shared": False}),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


class Rank:
    """One rank: an engine, a pool and a transceiver."""

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        settings: HandoverSettings,
        *,
        transports: str,
        is_shared: bool = True,
        store: Callable[["Rank"], Any] | None = None,
    ) -> None:
        self.layout, self.rank = layout, rank
        self.engine = TransferEngine("", TransferSettings(transports=transports, rails="lo"))
        self.regions: list[Region] = []
        self._outcomes: dict[bytes, KVStoreError | None] = {}
        for number in range(layout.region_count(rank)):
            size = layout.region_bytes(rank, number)
            if is_shared:
                self.regions.append(self.engine.allocate(size))
            else:
                self.regions.append(Region(memoryview(bytearray(size))))
        self.transceiver = CacheTransceiver(
            layout,
            rank,
            self.regions,
            self.engine,
            settings,
            store=store(self) if store is not None else None,
        )

    def outcome_of(self, request_id: bytes) -> KVStoreError | None:
        """Wait until the request is finished on all ranks; with what."""

        def is_there() -> bool:
            for outcome in self.transceiver.finished():
                assert outcome.request_id not in self._outcomes, "a request is finished once"
                self._outcomes[outcome.request_id] = outcome.error
            return request_id in self._outcomes

        eventually(is_there, f"the outcome of {request_id!r}")
        return self._outcomes[request_id]

    def engine_peers(self) -> list[Peer]:
        return self.engine.peers()

    @property
    def memory(self) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(region.memory, np.uint8) for region in self.regions]

    def close(self) -> None:
        self.transceiver.close()
        self.engine.close()
        for region in self.regions:
            region.close()


class Executor:
    """All ranks of one executor, joined. A context manager that closes them."""

    def __init__(
        self,
        layout: CacheLayout,
        settings: HandoverSettings | None = None,
        *,
        transports: str = "tcp",
        **how: Any,
    ) -> None:
        self.layout = layout
        self._stack = ExitStack()
        self.ranks: list[Rank] = []
        try:
            for number in range(layout.parallel.ranks):
                self.ranks.append(Rank(layout, number, settings or HandoverSettings(deadline_s=10), transports=transports, **how))
                self._stack.callback(self.ranks[-1].close)
            self.descriptions = [rank.transceiver.describe() for rank in self.ranks]
            for rank in self.ranks:
                rank.transceiver.join(self.descriptions)
        except BaseException:
            self._stack.close()
            raise

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for rank in self.ranks:
            for memory in rank.memory:
                memory[:] = np.frombuffer(random.bytes(len(memory)), np.uint8)

    def counterpart(self, other: "Executor") -> RemoteExecutor:
        """The other executor, as this one knows it."""
        return self.ranks[0].transceiver.connect(other.descriptions)

    def send(self, request_id: bytes, blocks: Sequence[int], tokens: int, **how: Any) -> list[SendHandle]:
        return [rank.transceiver.send(request_id, blocks, tokens=tokens, **how) for rank in self.ranks]

    def receive(self, request_id: bytes, blocks: Sequence[int], tokens: int, source: "Executor", **how: Any) -> list[ReceiveHandle]:
        counterpart = self.counterpart(source)
        return [rank.transceiver.receive(request_id, blocks, tokens=tokens, source=counterpart, **how) for rank in self.ranks]

    def until(self, is_so: Callable[[], bool]) -> None:
        eventually(is_so, "what the test waits for")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def executor(layout: CacheLayout, way: str, /, **more: Any) -> Executor:
    settings, how = WAYS[way]
    return Executor(layout, HandoverSettings(**{"deadline_s": 20, **settings, **more}), **how)


def outcomes(executors: Sequence[Executor], request_id: bytes) -> list[KVStoreError | None]:
    """With what the request is finished, as each of their ranks says."""
    return [rank.outcome_of(request_id) for executor in executors for rank in executor.ranks]


def gathered(executor: Executor, blocks: Sequence[int], tokens: int, *, ranks: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The cache of a sequence, [layers, kv, heads, tokens or records, bytes], by the definition of the layout; ranks that have the same
    agree. It only trusts that blocks, and tokens, lie equally far apart."""
    layout = executor.layout
    spec, cp = layout.spec, layout.parallel.cp
    steps = 1 if layout.has_records else spec.block_tokens
    units = -(-tokens // (spec.block_tokens // steps))
    found = np.zeros((spec.layers, spec.kv_factor, spec.kv_heads, units, layout.unit_bytes(0)), np.uint8)
    is_known = np.zeros(found.shape[:4], bool)
    for rank in range(layout.parallel.ranks) if ranks is None else ranks:
        positions = np.arange(units)
        positions = positions[positions // steps % cp == layout.parallel.coordinates(rank).cp]
        at = np.array(blocks)[positions // steps], positions % steps
        for layer in layout.rank_layers(rank):
            for head in layout.rank_heads(rank):
                for kv in range(spec.kv_factor):
                    part = units_at(executor, rank, (layer, kv, head), *at)
                    place = layer, kv, head, positions
                    assert np.array_equal(found[place][is_known[place]], part[is_known[place]])
                    found[place], is_known[place] = part, True
    assert is_known.all()
    return found


def units_at(
    executor: Executor, rank: int, place: tuple[int, int, int], blocks: NDArray[np.intp], tokens: NDArray[np.intp]
) -> NDArray[np.uint8]:
    """Units of one layer, K or V, and head."""
    layout = executor.layout
    region, start = layout.locate(rank, *place, 0, 0)
    block_bytes = layout.locate(rank, *place, 1, 0)[1] - start
    token_bytes = 0 if layout.has_records else layout.locate(rank, *place, 0, 1)[1] - start
    offsets = start + blocks * block_bytes + tokens * token_bytes
    found: NDArray[np.uint8] = executor.ranks[rank].memory[region][offsets[:, None] + np.arange(layout.unit_bytes(place[1]))]
    return found


def make_consistent(executor: Executor) -> None:
    """Ranks with the same heads have the same bytes, as after a prefill."""
    layout = executor.layout
    parallel = layout.parallel
    for rank in range(parallel.ranks):
        for other in range(rank):
            same = layout.rank_heads(rank) == layout.rank_heads(other) and layout.rank_layers(rank) == layout.rank_layers(other)
            if same and parallel.coordinates(rank).cp == parallel.coordinates(other).cp:
                for ours, theirs in zip(executor.ranks[rank].memory, executor.ranks[other].memory, strict=True):
                    ours[:] = theirs
                break
