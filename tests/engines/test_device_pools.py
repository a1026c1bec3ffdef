"""Pools on the device through the connectors' copy code and a real store: no engine, cuda:0 or the CPU."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.parts import ValueShape
from kvstore.engines.sglang.page_mover import PageMover
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import LayerPools
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from tests.client.embedded import embedded
from tests.devices import DEVICE, HAS_CUDA, keep_busy
from tests.engines.sglang.host_pool import HostPool
from tests.engines.vllm.test_worker import await_loads, hashes

pytestmark = pytest.mark.gpu

BLOCKS, LAYERS = 12, 4
NUMBERS = itertools.count()
SPEC = CacheSpec(layers=LAYERS, kv_heads=2, head_dim=16, heads=4, dtype="bfloat16", block_tokens=16)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded(ClusterPlan(dram="64MiB", is_private=True)) as cluster:
        yield cluster.address


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model=f"device-{next(NUMBERS)}", dtype="bfloat16", block_tokens=16)


@pytest.fixture
def own_stream() -> Iterator[None]:
    """The engine's work is on a stream of its own, which does not wait for the default one."""
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if HAS_CUDA else contextlib.nullcontext():
        yield


def vllm_layers() -> list[torch.Tensor]:
    """vLLM's `[blocks, 2, tokens, heads, head_dim]` of each layer."""
    return [torch.zeros(BLOCKS, 2, 16, 2, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]


@contextlib.contextmanager
def rank(address: str, namespace: Namespace, layers: list[torch.Tensor]) -> Iterator[Worker]:
    worker = Worker(Client(address), [RankGroup(Shard(namespace), LayerPools(layers, BLOCKS))], VllmSettings())
    with contextlib.closing(worker):
        yield worker


@pytest.mark.usefixtures("own_stream")
def test_vllm_saves_what_late_kernels_write(address: str, namespace: Namespace) -> None:
    source, target = vllm_layers(), vllm_layers()
    computed = torch.randn(BLOCKS, 2, 16, 2, 16, device=DEVICE).to(torch.bfloat16)
    with rank(address, namespace, source) as writer, rank(address, namespace, target) as reader:
        keep_busy()
        for layer in source:
            layer.copy_(computed)
        writer.save(StepPlan(saves=[BlockTransfer("a", [3, 1, 11], hashes(3))]))
        writer.flush()
        reader.load(StepPlan(loads=[BlockTransfer("b", [0, 7, 2], hashes(3))], is_idle=True))
        await_loads(reader, {"b"})
        assert not reader.take_failed()
    for layer in target:
        assert torch.equal(layer[[0, 7, 2]], computed[[3, 1, 11]])
        assert not layer[[1, 3, 4, 5, 6, 8, 9, 10, 11]].any()


@pytest.mark.usefixtures("own_stream")
def test_vllm_loads_wait_for_kernels_launched_before(address: str, namespace: Namespace) -> None:
    """A step that has been launched may still read the blocks that the next one loads into."""
    source, target = vllm_layers(), vllm_layers()
    for layer in source:
        layer.fill_(5)
    with rank(address, namespace, source) as writer, rank(address, namespace, target) as reader:
        writer.save(StepPlan(saves=[BlockTransfer("a", [0, 1], hashes(2))]))
        writer.flush()
        keep_busy()
        read = [layer[:2].clone() for layer in target]
        reader.load(StepPlan(loads=[BlockTransfer("b", [0, 1], hashes(2))], is_idle=True))
        await_loads(reader, {"b"})
    for layer, before in zip(target, read, strict=True):
        assert not before.any()
        assert (layer[:2] == 5).all()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_sglang_pages_pass_through_host_pools(address: str, layout: str) -> None:
    """SGLang copies pages between its device pool and host pools, which the store reads and fills in place."""
    whole, back = HostPool(layout, 2, seed=3), HostPool(layout, 2)
    pages = torch.from_numpy(whole.pages.copy()).to(DEVICE)
    whole.pages[:] = 0
    pool = whole.describe_pool((0, 1), model=f"device-{next(NUMBERS)}")
    names = [f"{number:064x}" for number in range(3)]
    with Client(address) as client, Jobs(client) as jobs:
        mover = PageMover(jobs)
        whole.pages[:] = pages.cpu().numpy()
        assert mover.store(pool, names, [], *whole.meta(4, 0, 2))() == [True] * 3
        assert mover.load(pool, names, *back.meta(1, 3, 0))() == [True] * 3
    loaded = torch.from_numpy(back.pages[:, [1, 3, 0]].copy()).to(DEVICE)
    assert torch.equal(loaded, pages[:, [4, 0, 2]])
    assert not np.any(back.pages[:, [2, 4]])


def test_tensor_cache_serves_several_streams(address: str, namespace: Namespace) -> None:
    """Threads with streams and blocks of their own share a pool; each puts what its late kernels write."""
    pool = torch.zeros(BLOCKS, LAYERS, 2, 2, 16, 16, dtype=torch.bfloat16, device=DEVICE)
    target = torch.zeros_like(pool)
    wrong: list[int] = []

    def one(client: Client, number: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(DEVICE)) if HAS_CUDA else contextlib.nullcontext()
        cache = TensorCache(client, SPEC, namespace, values=ValueShape(heads=2))
        blocks = [3 * number, 3 * number + 1, 3 * number + 2]
        with stream:
            for turn in range(3):
                tokens = [100 * number + turn] * 48
                filled = torch.randn(3, LAYERS, 2, 2, 16, 16, device=DEVICE).to(torch.bfloat16)
                keep_busy(20_000_000)
                pool[blocks] = filled
                cache.put_tensor(tokens, pool, blocks=blocks)
                if cache.get_tensor(tokens, target, blocks=blocks) != 3 or not torch.equal(target[blocks], filled):
                    wrong.append(number)

    with Client(address) as client:
        threads = [threading.Thread(target=one, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_device_tensors_are_values_of_a_client(address: str) -> None:
    """Single, as rows of one tensor, and beside host memory."""
    rows = torch.arange(4 * 8192, device=DEVICE).to(torch.uint8).view(4, -1)
    back = torch.zeros_like(rows)
    names = [f"{next(NUMBERS)}-{number}".encode() for number in range(6)]
    with Client(address) as client:
        assert all(client.put_batch(names[:4], rows))
        assert client.get_batch_into(names[:4], list(back)) == [8192] * 4
        assert torch.equal(rows, back)
        client.put(names[4], rows[2])
        client.put(names[5], [rows[1], b"end"])
        assert client.get(names[4]) == rows[2].cpu().numpy().tobytes()
        assert client.get(names[5]) == rows[1].cpu().numpy().tobytes() + b"end"
