"""Whole SGLang engines whose weights or LoRAs change: a page of other weights is never loaded, and what is right is found.

Tokens and log-probabilities are held to those of an engine without a store that has the same weights.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import python_of
from tests.engines.live.sglang.engines import PAGE, PATIENT, Engine, prompt
from tests.engines.live.sglang.hicache import FOLDER, path
from tests.engines.live.vllm.engines import Answer
from tests.ports import free_ports

PAGES = 12
CACHED = PAGES * PAGE


def write_other(folder: Path, source: Path, seed: int) -> None:
    """Overwrite the weights of `folder` by those of `source`, each tensor's numbers in another order."""
    random = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    shuffled = {name: random.permutation(value.ravel()).reshape(value.shape) for name, value in tensors.items()}
    save_file(shuffled, folder / "model.safetensors", metadata={"format": "pt"})


def write_lora(folder: Path, seed: int) -> None:
    subprocess.run([python_of("sglang"), FOLDER / "tiny_lora.py", folder, str(seed)], env=os.environ | path(), check=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    """Three folders that differ in their weights only."""
    root = tmp_path_factory.mktemp("engines")
    folders = [root / f"model-{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        shutil.copytree(model, folder)
        if number:
            write_other(folder, model, number)
    return folders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("store")) as started:
        started.start_node("--name", "n", "--dram", "128MiB")
        yield started


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> Iterator[Engine]:
    with Engine(models[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def two(models: list[Path], store: Cluster) -> Iterator[tuple[Engine, Engine]]:
    settings = PATIENT | {"master": store.address}
    with Engine(models[0], store=settings, enable_metrics=True, log_level="info") as first, Engine(models[0], store=settings) as second:
        yield first, second


def right(plain: Engine, folder: Path, asked: list[int]) -> Answer:
    """Return the answer of an engine without a store, with the weights of `folder`."""
    plain.forget()
    plain.update(folder, "disk")
    return plain.generate(asked)[0]


def check(engine: Engine, asked: list[int], wanted: Answer, cached: int) -> None:
    """From the store alone, not from the engine's own pools."""
    engine.forget()
    engine.generate(asked)[0].check_same(wanted, cached=cached)
    engine.forget()


def test_one_of_two_engines_updated_from_disk(plain: Engine, models: list[Path], store: Cluster, two: tuple[Engine, Engine]) -> None:
    """Neither loads the other's pages; one that starts from the new files loads those of the updated one."""
    first, second = two
    asked = prompt(1)
    old, new = right(plain, models[0], asked), right(plain, models[1], asked)
    assert old.tokens != new.tokens
    check(first, asked, old, 0)
    check(second, asked, old, CACHED)
    first.update(models[1], "disk")
    for _ in range(2):
        check(first, asked, new, 0 if _ == 0 else CACHED)
        check(second, asked, old, CACHED)
    with Engine(models[1], store=PATIENT | {"master": store.address}) as fresh:
        check(fresh, asked, new, CACHED)
    first.update(models[0], "disk", version="a name is not needed: the files are the same".replace(" ", "-"))
    check(first, asked, old, CACHED)


def test_updates_in_memory_share_by_name_only(plain: Engine, models: list[Path], two: tuple[Engine, Engine]) -> None:
    first, second = two
    asked = prompt(2)
    old, new, newest = (right(plain, folder, asked) for folder in models)
    check(first, asked, old, 0)
    first.update(models[1], "tensor", version="step-1")
    check(first, asked, new, 0)
    check(second, asked, old, CACHED)
    second.update(models[1], "tensor", version="step-1")
    check(second, asked, new, CACHED)
    first.update(models[2], "tensor")
    check(first, asked, newest, 0)
    check(first, asked, newest, CACHED)
    check(second, asked, new, CACHED)
    second.update(models[2], "tensor")
    check(second, asked, newest, 0)
    for engine in two:
        engine.update(models[0], "disk")
        check(engine, asked, old, CACHED)


def test_an_update_without_flush_saves_nothing_until_one(plain: Engine, models: list[Path], two: tuple[Engine, Engine]) -> None:
    """SGLang keeps pages of the old weights and computes on top of them."""
    first, second = two
    asked, longer = prompt(3), prompt(3) + prompt(4)
    check(first, asked, right(plain, models[0], asked), 0)
    first.generate(asked)
    first.update(models[1], "tensor", version="unflushed", flush=False)
    first.generate(longer)
    second.update(models[1], "tensor", version="unflushed")
    check(second, longer, right(plain, models[1], longer), 0)
    check(first, longer, right(plain, models[1], longer), len(longer) // PAGE * PAGE)
    for engine in two:
        engine.update(models[0], "disk")


def test_clear_finds_nothing_older(plain: Engine, models: list[Path], two: tuple[Engine, Engine]) -> None:
    first, second = two
    asked = prompt(5)
    wanted = right(plain, models[0], asked)
    check(first, asked, wanted, 0)
    check(first, asked, wanted, CACHED)
    assert first.clear()
    check(first, asked, wanted, 0)
    check(first, asked, wanted, CACHED)
    check(second, asked, wanted, CACHED)
    first.update(models[0], "disk")
    check(first, asked, wanted, CACHED)


def test_an_engine_says_what_its_pages_are_stored_under(two: tuple[Engine, Engine]) -> None:
    first, _ = two
    assert "pages of pool kv are in namespace" in first.log
    assert "revision='sampled-" in first.log
    counted = first.metrics()
    assert counted["kvstore_pages_loaded_total"] > 0
    assert counted["kvstore_pages_asked_total"] > counted["kvstore_pages_found_total"] > 0


def test_files_overwritten_before_a_restart(plain: Engine, models: list[Path], store: Cluster) -> None:
    """Weights, then a LoRA of one name and path; both of equal size."""
    asked = prompt(6)
    old, new = right(plain, models[0], asked), right(plain, models[1], asked)
    folder, lora = models[0].with_name("overwritten"), models[0].with_name("lora")
    shutil.copytree(models[0], folder)
    write_lora(lora, 1)
    settings = PATIENT | {"master": store.address}
    with Engine(folder, store=settings) as engine:
        check(engine, asked, old, 0)
    shutil.copyfile(models[1] / "model.safetensors", folder / "model.safetensors")
    with Engine(folder, store=settings, lora=lora) as engine:
        check(engine, asked, new, 0)
        engine.generate(asked, lora="lora")
        engine.forget()
        assert engine.generate(asked, lora="lora")[0].cached == CACHED
    shutil.rmtree(lora)
    write_lora(lora, 2)
    with Engine(folder, lora=lora) as other, Engine(folder, store=settings, lora=lora) as engine:
        (wanted,) = other.generate(asked, lora="lora")
        engine.generate(asked, lora="lora")[0].check_same(wanted, cached=0)


def test_an_engine_says_soon_that_its_store_is_not_there(models: list[Path]) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Engine(models[0], store={"master": address}, log_level="warning") as lonely:
        lonely.generate(prompt(7))
        assert f"kvstore: the store at {address} cannot be reached" in lonely.log
