"""Real vLLM engines with a real store: prefixes are found by other processes, and what comes of a prompt is what comes without a store."""

import itertools
import signal
from functools import partial
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.testing.transfer.waiting import eventually
from tests.client.processes import Cluster
from tests.engines.live.full import filled
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Answer, Engine, prompt, start_node
from tests.ports import free_ports

BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS


def expected(plain: Engine, *prompts: list[int], tokens: int = 8) -> list[Answer]:
    plain.forget()
    return plain.generate(*prompts, tokens=tokens)


def test_a_prompt_that_one_engine_computed_is_another_s(plain: Engine, waiting: Engine, loading: Engine) -> None:
    asked = prompt(1)
    (right,) = expected(plain, asked)
    (cold,) = waiting.generate(asked)
    cold.check_same(right)
    assert cold.cached == 0
    waiting.flush()
    waiting.forget()
    for engine in (waiting, loading):
        (warm,) = engine.generate(asked)
        warm.check_same(right)
        assert warm.cached == CACHED


def test_blocks_of_a_salted_request_are_for_those_with_its_salt(plain: Engine, waiting: Engine, loading: Engine) -> None:
    asked = prompt(2)
    (right,) = expected(plain, asked)
    waiting.generate(asked, salts=["one"])
    waiting.flush()
    for salt, cached in (("another", 0), ("one", CACHED)):
        (answer,) = loading.generate(asked, salts=[salt])
        answer.check_same(right)
        assert answer.cached == cached


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_block_that_vanishes_before_it_is_loaded_is_computed_and_saved_again(
    plain: Engine, waiting: Engine, loading: Engine, *, is_async: bool, place: int
) -> None:
    loser, other = (loading, waiting) if is_async else (waiting, loading)
    asked = prompt(10 + 2 * place + is_async)
    (right,) = expected(plain, asked)
    other.generate(asked)
    other.flush()
    other.forget()
    loser.tell("lose", places=[place])
    (answer,) = loser.generate(asked)
    answer.check_same(right)
    loser.flush()
    (again,) = other.generate(asked)
    again.check_same(right)
    assert again.cached == CACHED


def test_requests_that_are_preempted_go_on_as_if_they_had_not_been(plain: Engine, waiting: Engine, loading: Engine) -> None:
    """Eight requests that grow to 72 blocks in a pool of 64."""
    asked = [prompt(seed) for seed in range(20, 28)]
    right = expected(plain, *asked, tokens=110)
    for engine in (waiting, loading):
        before = engine.tell("metrics")["vllm:num_preemptions"]
        engine.forget()
        for answer, wanted in zip(engine.generate(*asked, tokens=110), right, strict=True):
            answer.check_same(wanted)
        engine.flush()
        assert engine.tell("metrics")["vllm:num_preemptions"] > before


def test_two_engines_may_compute_the_same_prompts_at_once(plain: Engine, waiting: Engine, loading: Engine) -> None:
    asked = [prompt(seed) for seed in range(30, 34)]
    right = expected(plain, *asked)
    for engine in (waiting, loading):
        engine.begin(*asked)
    for engine in (waiting, loading):
        for answer, wanted in zip(engine.answers(), right, strict=True):
            answer.check_same(wanted)
        engine.flush()
    for engine in (waiting, loading):
        engine.forget()
        for answer, wanted in zip(engine.generate(*asked), right, strict=True):
            answer.check_same(wanted)
            assert answer.cached == CACHED


def test_an_engine_of_another_element_type_shares_nothing(model: Path, store: Cluster, waiting: Engine) -> None:
    asked = prompt(40)
    waiting.generate(asked)
    waiting.flush()
    with Engine(model, store=PATIENT | {"master": store.address}, dtype="bfloat16") as other:
        assert other.generate(asked)[0].cached == 0
        other.flush()
        other.forget()
        assert other.generate(asked)[0].cached == CACHED


def test_an_engine_may_begin_without_the_store(plain: Engine, model: Path) -> None:
    asked = prompt(45)
    (right,) = expected(plain, asked)
    with Engine(model, store={"master": f"127.0.0.1:{free_ports(1)[0]}"}) as lonely:
        for _ in range(2):
            (answer,) = lonely.generate(asked)
            answer.check_same(right)
            lonely.forget()


def test_a_full_store_costs_only_what_it_does_not_take(plain: Engine, store: Cluster, waiting: Engine, loading: Engine) -> None:
    asked = prompt(50)
    (right,) = expected(plain, asked)
    with Client(store.address) as client, filled(client):
        (answer,) = waiting.generate(asked)
        answer.check_same(right)
        waiting.flush()
        assert loading.generate(asked)[0].cached < CACHED
    waiting.forget()
    loading.forget()
    waiting.generate(asked)
    waiting.flush()
    (answer,) = loading.generate(asked)
    answer.check_same(right)
    assert answer.cached == CACHED


def test_a_master_that_is_killed_costs_only_what_it_knows(plain: Engine, store: Cluster, waiting: Engine, loading: Engine) -> None:
    asked, known, later = prompt(60), prompt(61), prompt(62)
    right_known, right_later = expected(plain, known, later)
    (right,) = expected(plain, asked, tokens=200)
    waiting.generate(known)
    waiting.flush()
    loading.begin(asked, tokens=200)
    store.master.stop(signal.SIGKILL)
    (answer,) = loading.answers()
    answer.check_same(right)
    for engine in (waiting, loading):
        engine.forget()
        (answer,) = engine.generate(known)
        answer.check_same(right_known)
    store.start_master()

    def is_shared() -> bool:
        """Each time it is computed anew, and saved once the engine has found the master again."""
        for engine in (waiting, loading):
            engine.forget()
        answers = [*waiting.generate(later), *loading.generate(later)]
        for answer in answers:
            answer.check_same(right_later)
        return answers[1].cached == CACHED

    eventually(is_shared, "both engines have found the master again")


def test_a_node_that_is_killed_comes_back_with_what_was_on_nvme(plain: Engine, store: Cluster, waiting: Engine, loading: Engine) -> None:
    asked, meanwhile = prompt(70), prompt(71)
    right, right_meanwhile = expected(plain, asked, meanwhile)
    keys = [bytes.fromhex(key) for key in waiting.tell("keys", prompt=asked, block_tokens=BLOCK_TOKENS)]
    numbers = itertools.count()
    with Client(store.address) as client:

        def is_down() -> bool:
            """Other blocks push them out of DRAM; those that were lost on the way are computed again."""
            if not all(client.locate(keys)):
                waiting.forget()
                waiting.generate(asked)
                waiting.flush()
            client.put_batch([f"other-{next(numbers)}".encode() for _ in range(16)], [bytes(1 << 17)] * 16)
            client.flush(deadline_s=60)
            return all(places and "nvme" in places[0].tiers for places in client.locate(keys))

        eventually(is_down, "the prompt's blocks are on NVMe")
    store.nodes[-1].stop(signal.SIGKILL)
    (answer,) = loading.generate(meanwhile)
    answer.check_same(right_meanwhile)
    start_node(store)

    def is_found() -> bool:
        loading.forget()
        (answer,) = loading.generate(asked)
        answer.check_same(right)
        return answer.cached == CACHED

    eventually(is_found, "the blocks that were on NVMe are loaded")
    seeds = itertools.count(1000)

    def is_stored(engine: Engine) -> bool:
        """What was put at a node that is gone is lost, which is told once."""
        engine.generate(prompt(next(seeds)))
        return not engine.tell("flush")

    for engine in (waiting, loading):
        eventually(partial(is_stored, engine), "what the engine saves goes to the new node")
