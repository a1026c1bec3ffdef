"""Real vLLM engines with a real store."""

import itertools

import pytest

from kvstore.client import Client
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster
from tests.engines.live.sharing import Sharing
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, check_all, expected, prompt

CACHED = 5 * BLOCK_TOKENS


class TestVllm(Sharing):
    engine, cached = Engine, CACHED

    def prompt(self, seed: int) -> list[int]:
        return prompt(seed)

    def salted(self, salt: str) -> dict[str, list[str]]:
        return {"salts": [salt]}

    def keys(self, client: Client, engine: Engine, asked: list[int]) -> list[bytes]:
        return [bytes.fromhex(key) for key in engine.tell("keys", prompt=asked, block_tokens=BLOCK_TOKENS)]

    def recover(self, engine: Engine) -> None:
        seeds = itertools.count(1000)

        def is_stored() -> bool:
            """Save a new prompt; return True if the save succeeded. A save to a dead node fails once."""
            engine.generate(prompt(next(seeds)))
            return not engine.tell("flush")

        eventually(is_stored, "what the engine saves goes to the new node")


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_block_evicted_before_its_load_is_recomputed_and_saved(
    plain: Engine, first: Engine, second: Engine, *, is_async: bool, place: int
) -> None:
    loser, other = (second, first) if is_async else (first, second)
    asked = prompt(10 + 2 * place + is_async)
    (right,) = expected(plain, asked)
    other.save(asked)
    other.forget()
    loser.tell("lose", places=[place])
    loser.save(asked)[0].check_same(right)
    other.generate(asked)[0].check_same(right, cached=CACHED)


def test_preempted_requests_give_the_same_output(plain: Engine, first: Engine, second: Engine) -> None:
    """Eight requests that grow to 72 blocks in a pool of 64."""
    asked = [prompt(seed) for seed in range(20, 28)]
    right = expected(plain, *asked, tokens=110)
    for engine in (first, second):
        before = engine.tell("metrics")["vllm:num_preemptions"]
        engine.forget()
        check_all(engine.generate(*asked, tokens=110), right)
        engine.flush()
        assert engine.tell("metrics")["vllm:num_preemptions"] > before


def test_session_of_requests_ends_in_the_store(first: Engine, second: Engine, store: Cluster) -> None:
    """Blocks that a request of another session has loaded stay. Malformed hints fail no request."""
    asked = prompt(80)  # no other test saves it: its blocks would have no session
    first.save(asked, hints=[{"session": "live", "ranges": [[0, BLOCK_TOKENS, 70]], "ttl_s": 600}])
    (answer,) = second.generate(asked[: 2 * BLOCK_TOKENS + 5], hints=[{"session": "other"}])
    assert answer.cached == 2 * BLOCK_TOKENS
    second.generate(prompt(81), hints=[{"priority": "high"}])
    metrics = second.tell("metrics")
    assert (metrics["vllm:kvstore_hinted_requests"], metrics["vllm:kvstore_malformed_hints"]) == (1, 1)
    with Client(store.address) as client:
        assert client.end_session("other") == 0
        assert client.end_session("live") == 3
