"""A vLLM server that computes prompts and one that goes on, behind kvstore-router: blocks go over through the store, and answers are those
of one engine alone."""

import signal
from concurrent.futures import ThreadPoolExecutor

from tests.engines.live.router.comparing import ask, body_of
from tests.engines.live.router.fleet import BLOCK_TOKENS, Fleet
from tests.engines.live.router.kinds import COMPLETIONS
from tests.engines.live.vllm.engines import PATIENT, prompt

BLOCKS = 12
TOKENS = 8
WAIT_S = 30.0
"""For blocks that a slow machine stores late."""


FLEET = {"roles": ("prefill", "decode"), "settings": PATIENT | {"prefill_wait_s": WAIT_S}}


def alone(fleet: Fleet, asked: list[int]) -> str:
    """Return the text that the prefill server generates without the decode server."""
    reply = ask(fleet.servers[0].url, COMPLETIONS, body_of({"prompt": asked, "max_tokens": TOKENS, "ignore_eos": True}))
    return str(reply.body["choices"][0]["text"])


def loaded_tokens(fleet: Fleet) -> int:
    """Return the number of tokens that the decode server loaded from the store."""
    return round(fleet.servers[1].metric("vllm:external_prefix_cache_hits_total"))


def test_decode_server_continues_with_prefill_server_blocks(fleet: Fleet) -> None:
    """The router sends the request after the first token, while blocks are still being saved; the decode server waits for all of them."""
    prompts = [prompt(seed, BLOCKS) for seed in range(6)]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda asked: fleet.ask(asked, TOKENS), prompts))
    assert {(answer.decision["prefill"], answer.decision["decode"]) for answer in answers} == {("e0", "e1")}
    assert loaded_tokens(fleet) == len(prompts) * BLOCKS * BLOCK_TOKENS
    assert [answer.text for answer in answers] == [alone(fleet, asked) for asked in prompts]


def test_without_the_node_decode_server_recomputes_the_prompt(fleet: Fleet) -> None:
    before = loaded_tokens(fleet)
    fleet.store.nodes[-1].stop(signal.SIGKILL)
    asked = prompt(100, BLOCKS)
    answer = fleet.ask(asked, TOKENS)
    assert loaded_tokens(fleet) == before
    assert answer.text == alone(fleet, asked)
