"""An executor as the program sees it: ranks in processes, asked together; and the way of one request from one executor to another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from disaggregation.workers import Workers
from numpy.typing import NDArray

from kvstore.kvcache.layouts.layout import CacheLayout

Logits = NDArray[Any]
"""[tokens, vocabulary]."""


class Executor:
    """One process a rank of `layout`, over the model saved in `weights`. `folder` is for their meeting; `master` is the address of a
    store, or "". A context manager that ends the processes."""

    def __init__(self, name: str, layout: CacheLayout, *, weights: Path, folder: Path, master: str = "") -> None:
        self.layout = layout
        meeting = str(folder / f"{name}.meeting")
        every: dict[str, Any] = {"name": name, "layout": layout, "weights": str(weights), "meeting": meeting, "master": master}
        self.ranks = Workers(name, [("disaggregation.rank", "Rank", {**every, "rank": rank}) for rank in range(layout.parallel.ranks)])
        try:
            self.ranks.call("join", self.ranks.call("describe"))
        except BaseException:
            self.ranks.close()
            raise

    def connect(self, source: "Executor") -> None:
        """Requests will come from there."""
        self.ranks.call("connect", source.ranks.call("describe"))

    def forward(self, request: bytes, token_ids: list[int]) -> Logits:
        """Append tokens to a request; their logits."""
        return next(logits for logits in self.ranks.call("forward", request, token_ids) if logits is not None)

    def decode(self, request: bytes, token: int, count: int) -> Logits:
        """Greedily: the logits after `token`, and after each of the `count - 1` tokens chosen next."""
        found = []
        for _ in range(count):
            found.append(self.forward(request, [token]))
            token = int(found[-1][-1].argmax())
        return np.concatenate(found)

    def fetch_stored(self, request: bytes, prompt: list[int]) -> int:
        """Take from the store the blocks that all ranks find there; how many tokens that are. The last token of a prompt is always left
        to compute: its logits choose the first new one."""
        blocks: int = min(self.ranks.call("stored_blocks", prompt[:-1]))
        tokens = blocks * self.layout.spec.block_tokens
        if tokens:
            self.ranks.call("fetch", request, prompt[:tokens])
        return tokens

    def cache_bytes(self, tokens: int) -> int:
        """Return the cache size of so many tokens over all ranks; with more ranks than KV heads, some ranks hold the same heads."""
        spec, ranks = self.layout.spec, self.layout.parallel.shards
        return int(spec.bytes_per_token * tokens) * max(1, ranks // spec.kv_heads)

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *error: object) -> None:
        self.ranks.close()


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Cost of the hand-over of a prompt's cache to the other executor. Bytes are sums over all receiving ranks."""

    logits: Logits
    """Of the tokens that were computed."""
    computed_tokens: int
    moved_bytes: int
    """From executor to executor."""
    overlap_bytes: int
    """Of them, before their sender had computed its last layer."""
    store_tokens: int
    """Tokens that the receiving executor loaded from the store."""
    store_bytes: int
    """From the store, by the ranks of both."""


def hand_over(
    request: bytes, prompt: list[int], source: Executor, destination: Executor, *, more_tokens: int, uses_store: bool = False
) -> HandedOver:
    """Prefill in `source` while its layers go to `destination`, which then has room for `more_tokens`. With the store, both take from
    there the blocks that it has: they are neither computed nor sent."""
    for executor in (source, destination):
        executor.ranks.call("begin", request, len(prompt) + more_tokens)
    known = source.fetch_stored(request, prompt) if uses_store else 0
    destination.ranks.call("receive", request, prompt, uses_store)
    source.ranks.call("send", request, len(prompt))
    logits = source.forward(request, prompt[known:])
    received = destination.ranks.call("wait_received", request, len(prompt))
    sent = source.ranks.call("wait_sent", request)
    store_tokens = min(store_tokens for _, store_tokens in received)
    return HandedOver(
        logits=logits,
        computed_tokens=len(prompt) - known,
        moved_bytes=sum(moved_bytes for moved_bytes, _ in received),
        overlap_bytes=sum(overlap_bytes for _, overlap_bytes in sent),
        store_tokens=store_tokens,
        store_bytes=source.cache_bytes(known) + destination.cache_bytes(store_tokens),
    )


def is_equal(request: bytes, source: Executor, destination: Executor) -> bool:
    """Return whether every rank of `destination` has the same bits as the ranks of `source`, for its layers and heads."""
    spec, parts = source.layout.spec, source.ranks.call("contents", request)
    whole = np.zeros((spec.layers, spec.kv_factor, spec.kv_heads, *parts[0].shape[3:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[_own(source.layout, rank)] = part
    found = destination.ranks.call("contents", request)
    return all(whole[_own(destination.layout, rank)].tobytes() == part.tobytes() for rank, part in enumerate(found))


def _own(layout: CacheLayout, rank: int) -> tuple[slice, slice, slice]:
    layers, heads = layout.rank_layers(rank), layout.rank_heads(rank)
    return slice(layers.start, layers.stop), slice(None), slice(heads.start, heads.stop)
