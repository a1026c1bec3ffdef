"""What puts and gets cost an engine: steps of matrix products, alone and beside a thread that moves blocks, in turn."""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from benchmarks.gpu.device import BLOCKS, DEVICE, HAS_CUDA, synchronize
from benchmarks.gpu.paged import SPEC, TABLE, layers
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.parts import ValueShape
from kvstore.kvcache.namespace import Namespace

SIDE: Final = 8192 if HAS_CUDA else 256
PRODUCTS: Final = 10
"""Products of a step, after which the engine's thread waits for the device."""
STEPS: Final = 40 if HAS_CUDA else 4
TURNS: Final = 4
MAX_PERCENT: Final = 3.0


def rows() -> Iterator[BenchRow]:
    with LocalCluster(ClusterPlan(is_private=True, dram="2GiB" if HAS_CUDA else "128MiB"), on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address) as client:
            cache = TensorCache(
                client, SPEC, Namespace(model="engine", dtype=SPEC.dtype, block_tokens=SPEC.block_tokens), values=ValueShape(heads=8)
            )
            source, _ = layers()
            target, _ = layers()
            turns = itertools.count()
            tokens = BLOCKS * SPEC.block_tokens
            known = [-1] * tokens
            yield from beside("puts", lambda: cache.put_tensor([next(turns)] * tokens, source, blocks=TABLE))
            cache.put_tensor(known, source, blocks=TABLE)
            yield from beside("gets", lambda: cache.get_tensor(known, target, blocks=TABLE))


def beside(what: str, call: Callable[[], Any]) -> Iterator[BenchRow]:
    """Rows of a step's time beside repeated calls, which are throttled by nothing."""
    factors = [torch.randn(SIDE, SIDE, device=DEVICE).to(torch.bfloat16) for _ in range(2)]
    product = torch.empty_like(factors[0])
    synchronize()
    call()
    of_steps(factors, product)
    alone_s, beside_s, moved = [], [], 0
    for _ in range(TURNS):
        alone_s += of_steps(factors, product)
        mover = Mover(call)
        try:
            beside_s += of_steps(factors, product)
        finally:
            moved += mover.stop()
    slowdown = 100 * (statistics.mean(beside_s) / statistics.mean(alone_s) - 1)
    yield BenchRow(f"step of {PRODUCTS} products of {SIDE} x {SIDE}, alone", 1000 * statistics.mean(alone_s), "ms")
    yield BenchRow(
        f"step beside {what}: {moved * BLOCKS * SPEC.block_bytes / sum(beside_s) / 1e9:.3g} GB/s", 1000 * statistics.mean(beside_s), "ms"
    )
    yield BenchRow(f"slowdown beside {what}", slowdown, "%", f"<= {MAX_PERCENT:g}", slowdown <= MAX_PERCENT if HAS_CUDA else None)


def of_steps(factors: list[Any], product: Any) -> list[float]:
    """Return the seconds of each step, on a stream of the engine's own."""
    taken_s = []
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if HAS_CUDA else contextlib.nullcontext():
        for _ in range(STEPS):
            begun_s = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(*factors, out=product)
            synchronize_stream()
            taken_s.append(time.perf_counter() - begun_s)
    return taken_s


def synchronize_stream() -> None:
    """Wait for the engine's stream only, as engines do."""
    if HAS_CUDA:
        torch.cuda.current_stream(DEVICE).synchronize()
    else:
        synchronize()


class Mover:
    """Thread that repeats a call until it is stopped."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._is_stopped = threading.Event()
        self._count = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="mover")
        self._thread.start()

    def stop(self) -> int:
        """Return how many calls there were. Raises what one of them raised."""
        self._is_stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._count

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                self._call()
                self._count += 1
        except Exception as error:
            self._error = error
