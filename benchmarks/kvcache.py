"""`make bench-kvcache`: codecs against memcpy, the time to plan a re-mapping and to cut its runs, and what sending layer by layer gains.
Every figure by the clock of this machine; ratios are of one run. Rows go to benchmarks/out/kvcache.json.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.handover import overlap_rows
from benchmarks.harness import report
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.kvcache.codecs.codec import decode, encode
from kvstore.kvcache.codecs.schemes import Scheme
from kvstore.kvcache.layouts.formatter import remap
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import EngineInfo
from kvstore.transfer.memory.region import Region, RemoteRegion
from kvstore.transfer.paths.batch import Batch, Runs, Span, groups_of
from kvstore.transfer.paths.peer import Peer, PeerRegion
from kvstore.transfer.paths.slices import cut

OUT: Final = Path(__file__).parent / "out" / "kvcache.json"
SCHEMES: Final = ("fp8-tensor", "fp8-head", "int8", "int8a", "int4/32", "int4/64", "int4/128", "int2/32")
SHAPE: Final = (16, 8, 8, 128, 128)
"""Blocks, layers, heads, tokens a block, head_dim: 32 MiB of bfloat16 for K, as much for V."""
OUTLIER_CHANNELS: Final = 4
"""Of K, each head's with values ten times as large: what KIVI found in real models (arXiv:2402.02750, section 3.2)."""
ROUNDS: Final = 5
PLAN_LAYERS: Final = 80
PLAN_BLOCKS: Final = 1000
STAGED_TOKENS: Final = 2048
MAX_PLAN_MS: Final = 50
RUNS: Final = 100_000
RUN_BYTES: Final = 32 << 10
MAX_RUNS_MS: Final = 100


def main() -> int:
    return report(itertools.chain(codec_rows(), plan_rows(), run_rows(), staging_rows(), overlap_rows()), OUT)


# --- codecs ---


def codec_rows() -> Iterator[BenchRow]:
    """Speeds count bytes of bfloat16, in or out; half of them K, half V."""
    key, value = cache(is_key=True), cache(is_key=False)
    copy, raw_bytes = torch.empty_like(key), key.nbytes + value.nbytes
    memcpy = raw_bytes / 2 / best_s(lambda: copy.copy_(key)) / 1e9
    yield BenchRow(f"memcpy of {key.nbytes >> 20} MiB, {torch.get_num_threads()} threads", memcpy, "GB/s")
    for name in SCHEMES:
        kind, _, group = name.partition("/")
        both = [_Coding(Scheme(kind, int(group or 0)), values, is_key=is_key) for values, is_key in ((key, True), (value, False))]
        stored_bytes = sum(coding.records.nbytes for coding in both)
        for verb, calls in (("encode", [coding.encode for coding in both]), ("decode", [coding.decode for coding in both])):
            gb_s = raw_bytes / sum(map(best_s, calls)) / 1e9
            yield BenchRow(f"{name}: {verb}", gb_s, "GB/s")
            yield BenchRow(f"{name}: {verb} / memcpy", gb_s / memcpy, "ratio")
        yield BenchRow(f"{name}: bytes saved", 1 - stored_bytes / raw_bytes, "share")
        yield BenchRow(f"{name}: bits a value, metadata included", 16 * stored_bytes / raw_bytes, "bits")
        for part, coding in zip("KV", both, strict=True):
            yield BenchRow(f"{name}: error of {part}, RMS / RMS", coding.relative_error(), "share")


class _Coding:
    """K or V under one scheme, with the memory that both ways need."""

    def __init__(self, scheme: Scheme, values: Any, *, is_key: bool) -> None:
        self._scheme, self._values, self._is_key = scheme, values, is_key
        self.records = encode(values, scheme, is_key=is_key)
        self._back = torch.empty_like(values)

    def encode(self) -> None:
        encode(self._values, self._scheme, is_key=self._is_key, out=self.records)

    def decode(self) -> None:
        *_, tokens, head_dim = SHAPE
        decode(self.records, self._scheme, is_key=self._is_key, tokens=tokens, head_dim=head_dim, dtype=torch.bfloat16, out=self._back)

    def relative_error(self) -> float:
        self.decode()
        return float((self._back.float() - self._values.float()).norm() / self._values.float().norm())


def cache(*, is_key: bool) -> Any:
    """Values as attention sees them: normal, K with a few channels of large ones."""
    generator = torch.Generator().manual_seed(int(is_key))
    values = torch.randn(SHAPE, generator=generator)
    if is_key:
        values[..., :OUTLIER_CHANNELS] *= 10
    return values.to(torch.bfloat16)


def best_s(call: Callable[[], Any]) -> float:
    """The least of ROUNDS, after one that touches the memory."""
    call()
    taken_s = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s)


# --- plans ---


def plan_rows() -> Iterator[BenchRow]:
    """All pairs of ranks of TP 8 -> TP 4, Llama 3 70B's shape."""
    for order in ("HND", "NHD"):
        name = f"plan of {PLAN_LAYERS} layers x TP 8 -> TP 4 x {PLAN_BLOCKS:,} blocks, {order}"
        source, destination = (layout(tp, order, pool_blocks=2 * PLAN_BLOCKS) for tp in (8, 4))
        blocks = np.random.default_rng(0).permutation(2 * PLAN_BLOCKS)[:PLAN_BLOCKS]
        begun_s = time.perf_counter()
        runs = build(source, destination, blocks)
        first_s = time.perf_counter() - begun_s
        yield BenchRow(f"{name}: runs", runs, "")
        yield BenchRow(f"{name}, of a new shape", first_s * 1000, "ms")
        cpu_s = time.thread_time()
        again_s = statistics.median(timed(lambda: build(source, destination, blocks)) for _ in range(ROUNDS))  # noqa: B023 - called at once
        cpu_s = (time.thread_time() - cpu_s) / ROUNDS
        yield at_most(f"{name}, of a shape seen before, median", again_s * 1000, "ms", MAX_PLAN_MS)
        yield BenchRow(f"{name}, of a shape seen before, of the processor", cpu_s * 1000, "ms")


def layout(tp: int, order: str, *, pool_blocks: int) -> CacheLayout:
    spec = CacheSpec(layers=PLAN_LAYERS, kv_heads=8, heads=64, head_dim=128, block_tokens=16)
    return CacheLayout(spec=spec, parallel=Parallel(tp=tp), pool_blocks=pool_blocks, order=order)


def run_rows() -> Iterator[BenchRow]:
    """Processor time of this thread to check many runs and cut them into slices, before agents receive them."""
    peer = Peer(EngineInfo("peer", "host"), TransferSettings(), random.Random(0), lambda place: ())
    ours = Region(np.empty(RUNS * RUN_BYTES, np.uint8).data)  # no page of it is ever touched
    theirs = PeerRegion(peer, RemoteRegion(1, ours.size_bytes, 7, {"tcp": b""}))
    source, destination = (np.random.default_rng(seed).permutation(RUNS) * RUN_BYTES for seed in (0, 1))
    none, length = np.broadcast_to(0, RUNS), np.broadcast_to(RUN_BYTES, RUNS)
    name = f"{RUNS:,} runs of {RUN_BYTES >> 10} KiB checked and cut into slices"
    columns = [timed_cpu(lambda: slices(Runs([ours], [theirs], none, source, none, destination, length))) for _ in range(ROUNDS)]
    yield at_most(f"{name}, as columns", min(columns) * 1000, "ms", MAX_RUNS_MS)
    ends = list(zip(source.tolist(), destination.tolist(), strict=True))
    listed = timed_cpu(lambda: slices([(Span(ours, here), Span(theirs, there), RUN_BYTES) for here, there in ends]))
    yield BenchRow(f"{name}, as a list", listed * 1000, "ms")


def slices(batch: Batch) -> int:
    return sum(len(cut(pieces, TransferSettings().slice_bytes)) for _, _, pieces in groups_of(batch))


def timed_cpu(call: Callable[[], Any]) -> float:
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


def staging_rows() -> Iterator[BenchRow]:
    """Alternative to a plan for short runs (256 bytes): copy rank 0's bytes through one buffer, in one thread."""
    blocks = np.random.default_rng(0).permutation(STAGED_TOKENS // 16)
    ends = [layout(tp, "NHD", pool_blocks=len(blocks)) for tp in (8, 4)]
    remapping = remap(*ends)
    pools = [np.ones(end.region_bytes(0, 0), np.uint8) for end in ends]
    staged, copy = np.ones(remapping.staged_bytes(0, 0, tokens=STAGED_TOKENS), np.uint8), np.ones(pools[0].size, np.uint8)
    memcpy = copy.nbytes / best_s(lambda: np.copyto(copy, pools[0])) / 1e9
    for name, call in (
        ("gathered", lambda: remapping.gather(0, 0, pools[:1], blocks, tokens=STAGED_TOKENS, out=staged)),
        ("scattered", lambda: remapping.scatter(0, 0, pools[1:], blocks, staged, tokens=STAGED_TOKENS)),
    ):
        gb_s = staged.nbytes / best_s(call) / 1e9
        yield BenchRow(f"NHD, TP 8 -> TP 4, {staged.nbytes >> 20} MiB in runs of 256 bytes, {name}", gb_s, "GB/s")
        yield BenchRow(f"NHD, {name} / memcpy", gb_s / memcpy, "ratio")


def build(source: CacheLayout, destination: CacheLayout, blocks: Any) -> int:
    """Return the number of runs of bytes of all pairs of ranks."""
    remapping = remap(source, destination)
    return sum(len(remapping.copies(pair.source_rank, pair.destination_rank, blocks, blocks).length) for pair in remapping.pairs)


def timed(call: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    sys.exit(main())
