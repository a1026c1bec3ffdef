"""Whole SGLang engines over our back end, on a CPU: prefixes are found by other processes, and what comes of a prompt is what comes
without a store."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.testing.transfer.waiting import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.full import filled
from tests.engines.live.sglang.engines import PAGE, PATIENT, Engine, prompt
from tests.engines.live.sglang.hicache import FOLDER, path
from tests.engines.live.vllm.engines import Answer
from tests.ports import free_ports

PAGES = 12
CACHED = PAGES * PAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by a process of its own: what makes it takes seconds to load."""
    folder = tmp_path_factory.mktemp("engines") / "model"
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", folder, "tiny"], cwd=ROOT, check=True)
    return folder


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


def start_node(store: Cluster) -> None:
    """The store's node, after the first time with the name and the NVMe that it had."""
    store.start_node("--name", "n", "--dram", "32MiB", "--nvme", f"{store.folder / 'nvme'}:128MiB")


def expected(plain: Engine, *prompts: list[int], tokens: int = 8, lora: str | None = None) -> list[Answer]:
    plain.forget()
    return plain.generate(*prompts, tokens=tokens, lora=lora)


def keys_of(client: Client, engine: Engine, asked: list[int]) -> list[bytes]:
    """Of the pages that come to the store as the engine computes the prompt, which it has not seen."""
    before = set(client.keys())
    engine.generate(asked)
    engine.forget()
    client.flush(deadline_s=60)
    eventually(lambda: len(set(client.keys()) - before) >= PAGES, "the prompt's pages are in the store")
    return list(set(client.keys()) - before)


def test_a_prompt_that_one_engine_computed_is_another_s(plain: Engine, first: Engine, second: Engine) -> None:
    asked = prompt(1)
    (right,) = expected(plain, asked)
    (cold,) = first.generate(asked)
    cold.check_same(right)
    assert cold.cached == 0
    first.forget()
    for engine in (first, second):
        (warm,) = engine.generate(asked)
        warm.check_same(right)
        assert warm.cached == CACHED


def test_pages_of_a_salted_request_are_for_those_with_its_salt(plain: Engine, first: Engine, second: Engine) -> None:
    asked = prompt(2)
    (right,) = expected(plain, asked)
    first.generate(asked, salt="one")
    first.forget()
    for salt, cached in ((None, 0), ("another", 0), ("one", CACHED)):
        (answer,) = second.generate(asked, salt=salt)
        answer.check_same(right)
        assert answer.cached == cached


def test_pages_of_a_lora_are_for_those_with_it(plain: Engine, first: Engine, second: Engine) -> None:
    """SGLang names an adapter that it was started with by its name and path: those of two processes are one."""
    asked = prompt(3)
    (right,) = expected(plain, asked)
    (right_with,) = expected(plain, asked, lora="lora")
    assert right.tokens != right_with.tokens
    first.generate(asked, lora="lora")
    first.forget()
    (answer,) = second.generate(asked)
    answer.check_same(right)
    assert answer.cached == 0
    (answer,) = second.generate(asked, lora="lora")
    answer.check_same(right_with)
    assert answer.cached == CACHED


@pytest.mark.parametrize("place", [0, 5])
def test_a_page_that_vanishes_before_it_is_read_is_computed_and_stored_again(
    plain: Engine, first: Engine, second: Engine, place: int
) -> None:
    asked = prompt(10 + place)
    (right,) = expected(plain, asked)
    first.generate(asked)
    first.forget()
    second.lose(place)
    (answer,) = second.generate(asked)
    answer.check_same(right)
    assert answer.cached == place * PAGE
    second.forget()
    (again,) = first.generate(asked)
    again.check_same(right)
    assert again.cached == CACHED


def test_two_engines_may_compute_the_same_prompts_at_once(plain: Engine, first: Engine, second: Engine) -> None:
    asked = [prompt(seed) for seed in range(20, 24)]
    right = expected(plain, *asked)
    for engine in (first, second):
        engine.begin(*asked)
    for engine in (first, second):
        for answer, wanted in zip(engine.answers(), right, strict=True):
            answer.check_same(wanted)
        engine.forget()
    for engine in (first, second):
        for answer, wanted in zip(engine.generate(*asked), right, strict=True):
            answer.check_same(wanted)
            assert answer.cached == CACHED
        engine.forget()


def test_an_engine_of_another_element_type_shares_nothing(model: Path, store: Cluster, first: Engine) -> None:
    asked = prompt(30)
    first.generate(asked)
    first.forget()
    with Engine(model, store=PATIENT | {"master": store.address}, dtype="bfloat16") as other:
        assert other.generate(asked)[0].cached == 0
        other.forget()
        assert other.generate(asked)[0].cached == CACHED


def test_an_engine_may_begin_without_the_store(plain: Engine, model: Path) -> None:
    asked = prompt(31)
    (right,) = expected(plain, asked)
    with Engine(model, store={"master": f"127.0.0.1:{free_ports(1)[0]}"}) as lonely:
        for _ in range(2):
            (answer,) = lonely.generate(asked)
            answer.check_same(right)
            assert answer.cached == 0
            lonely.forget()


def test_a_full_store_costs_only_what_it_does_not_take(plain: Engine, store: Cluster, first: Engine, second: Engine) -> None:
    asked = prompt(40)
    (right,) = expected(plain, asked)
    with Client(store.address) as client, filled(client):
        (answer,) = first.generate(asked)
        answer.check_same(right)
        first.forget()
        (answer,) = second.generate(asked)
        answer.check_same(right)
        assert answer.cached < CACHED
    second.forget()

    def is_shared() -> bool:
        """Each time it is computed anew, and stored once there is room."""
        for engine in (first, second):
            (answer,) = engine.generate(asked)
            answer.check_same(right)
            engine.forget()
        return answer.cached == CACHED

    eventually(is_shared, "what there is room for is stored")


def test_a_master_that_is_killed_costs_only_what_it_knows(plain: Engine, store: Cluster, first: Engine, second: Engine) -> None:
    asked, known, later = prompt(50), prompt(51), prompt(52)
    right_known, right_later = expected(plain, known, later)
    (right,) = expected(plain, asked, tokens=200)
    first.generate(known)
    first.forget()
    second.begin(asked, tokens=200)
    store.master.stop(signal.SIGKILL)
    (answer,) = second.answers()
    answer.check_same(right)
    for engine in (first, second):
        engine.forget()
        (answer,) = engine.generate(known)
        answer.check_same(right_known)
    store.start_master()

    def is_shared() -> bool:
        """Each time it is computed anew, and stored once the engine has found the master again."""
        for engine in (first, second):
            engine.forget()
            (answer,) = engine.generate(later)
            answer.check_same(right_later)
        return answer.cached == CACHED

    eventually(is_shared, "both engines have found the master again")


def test_a_node_that_is_killed_comes_back_with_what_was_on_nvme(plain: Engine, store: Cluster, first: Engine, second: Engine) -> None:
    asked, meanwhile = prompt(60), prompt(61)
    right, right_meanwhile = expected(plain, asked, meanwhile)
    numbers = itertools.count()
    with Client(store.address) as client:
        keys = keys_of(client, first, asked)

        def is_down() -> bool:
            """Other blocks push them out of DRAM."""
            client.put_batch([f"other-{next(numbers)}".encode() for _ in range(16)], [bytes(1 << 17)] * 16)
            client.flush(deadline_s=60)
            return all(places and "nvme" in places[0].tiers for places in client.locate(keys))

        eventually(is_down, "the prompt's pages are on NVMe")
    store.nodes[-1].stop(signal.SIGKILL)
    (answer,) = second.generate(meanwhile)
    answer.check_same(right_meanwhile)
    start_node(store)

    def is_found() -> bool:
        second.forget()
        (answer,) = second.generate(asked)
        answer.check_same(right)
        return answer.cached == CACHED

    eventually(is_found, "the pages that were on NVMe are read")
