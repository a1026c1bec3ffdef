"""A vLLM server that computes prompts and one that goes on, behind kvstore-router: blocks go over through the store, and answers are those
of one engine alone."""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.live.router.fleet import BLOCK_TOKENS, MODEL, Fleet, connection
from tests.engines.live.tiny_model import make

BLOCKS = 12
TOKENS = 8
WAIT_S = 30.0
"""For blocks that a slow machine stores late."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("model")
    make(model, "tiny")
    patient = {"lookup_deadline_s": 30, "load_deadline_s": 60, "prefill_wait_s": WAIT_S}
    with Fleet(tmp_path_factory.mktemp("fleet"), model, roles=("prefill", "decode"), settings=patient) as running:
        yield running


def prompt(seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 1000) for _ in range(BLOCKS * BLOCK_TOKENS + 7)]


def alone(fleet: Fleet, asked: list[int]) -> str:
    """What the server that computes prompts makes of one by itself."""
    body = {"model": MODEL, "prompt": asked, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with contextlib.closing(connection(fleet.servers[0].url)) as ask:
        ask.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        text: str = json.loads(ask.getresponse().read())["choices"][0]["text"]
        return text


def loaded_tokens(fleet: Fleet) -> int:
    """That the server which goes on has taken from the store."""
    return round(fleet.servers[1].metric("vllm:external_prefix_cache_hits_total"))


def test_one_server_computes_prompts_and_the_other_goes_on_with_their_blocks(fleet: Fleet) -> None:
    """It is asked as soon as the first token is made, when blocks are still on their way: it waits for all of them."""
    prompts = [prompt(seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda asked: fleet.ask(asked, TOKENS), prompts))
    assert {(answer.decision["prefill"], answer.decision["decode"]) for answer in answers} == {("e0", "e1")}
    assert loaded_tokens(fleet) == len(prompts) * BLOCKS * BLOCK_TOKENS
    assert [answer.text for answer in answers] == [alone(fleet, asked) for asked in prompts]


def test_without_the_store_s_node_the_prompt_is_computed_once_more(fleet: Fleet) -> None:
    before = loaded_tokens(fleet)
    fleet.store.nodes[-1].stop(signal.SIGKILL)
    asked = prompt(100)
    answer = fleet.ask(asked, TOKENS)
    assert loaded_tokens(fleet) == before
    assert answer.text == alone(fleet, asked)
