"""Whole SGLang engines over our back end, on a CPU."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import python_of
from tests.engines.live.sglang.engines import PAGE, PATIENT, Engine, prompt
from tests.engines.live.sglang.hicache import FOLDER, path
from tests.engines.live.sharing import Sharing
from tests.engines.live.vllm.engines import expected, start_node
from tests.telemetry.http.asking import ask

PAGES = 12
CACHED = PAGES * PAGE


@pytest.fixture(scope="module")
def lora(model: Path) -> Path:
    folder = model.with_name("lora")
    subprocess.run([python_of("sglang"), FOLDER / "tiny_lora.py", folder], env=os.environ | path(), check=True)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("store")) as started:
        start_node(started)
        yield started


@pytest.fixture(scope="module")
def plain(model: Path, lora: Path) -> Iterator[Engine]:
    """Without a store: what the others are held to."""
    with Engine(model, lora=lora) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(model: Path, lora: Path, store: Cluster) -> Iterator[Engine]:
    """It gives up soon what a full store does not take."""
    with Engine(model, store=PATIENT | {"master": store.address}, lora=lora) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(model: Path, lora: Path, store: Cluster) -> Iterator[Engine]:
    with Engine(model, store=PATIENT | {"master": store.address}, lora=lora) as engine:
        yield engine


class TestSglang(Sharing):
    engine, cached = Engine, CACHED

    def prompt(self, seed: int) -> list[int]:
        return prompt(seed)

    def salted(self, salt: str) -> dict[str, str]:
        return {"salt": salt}

    def keys(self, client: Client, engine: Engine, asked: list[int]) -> list[bytes]:
        """Return the keys that the store gains while the engine computes the prompt."""
        before = set(client.keys())
        engine.save(asked)
        client.flush(deadline_s=60)
        eventually(lambda: len(set(client.keys()) - before) >= PAGES, "the prompt's pages are in the store")
        return list(set(client.keys()) - before)


def test_pages_of_a_lora_are_for_those_with_it(plain: Engine, first: Engine, second: Engine) -> None:
    """SGLang names an adapter that it was started with by its name and path: those of two processes are one."""
    asked = prompt(3)
    (right,) = expected(plain, asked)
    (right_with,) = expected(plain, asked, lora="lora")
    assert right.tokens != right_with.tokens
    first.save(asked, lora="lora")
    second.generate(asked)[0].check_same(right, cached=0)
    second.generate(asked, lora="lora")[0].check_same(right_with, cached=CACHED)


@pytest.mark.parametrize("place", [0, 5])
def test_page_evicted_before_its_read_is_recomputed_and_stored(plain: Engine, first: Engine, second: Engine, place: int) -> None:
    asked = prompt(10 + place)
    (right,) = expected(plain, asked)
    first.save(asked)
    second.lose(place)
    second.save(asked)[0].check_same(right, cached=place * PAGE)
    first.generate(asked)[0].check_same(right, cached=CACHED)


def test_priority_of_a_request_is_a_hint_of_its_pages(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    with cluster(tmp_path) as store:
        node = store.start_node("--dram", "32MiB")
        settings = PATIENT | {"master": store.address, "retention_from_requests": True}
        with Engine(model, store=settings, radix_eviction_policy="priority") as engine:
            engine.save(prompt(60))
            engine.save(prompt(61), priority=10)
        eventually(lambda: f"kvstore_node_retained_blocks {PAGES}.0" in ask(node.ready["http"], "/metrics").text, "the node has the hints")
