"""Part 2 of the demonstration: prompts with a common prefix, and a store. Blocks in the store are neither computed nor sent."""

from typing import Final

from disaggregation.executor import Executor, HandedOver, hand_over, is_equal
from disaggregation.measures import Distance
from disaggregation.stage import PREFILL, Stage, bits, continued, name_of, new_table
from disaggregation.story import stories

from kvstore.kvcache.layouts.parallel import Parallel

SHARED_TOKENS: Final = 160
DECODE: Final = Parallel(tp=4)


def show_shared_prefix(stage: Stage, master: str) -> None:
    """`master`: the address of a store that is empty."""
    shared = stories(SHARED_TOKENS, seed=2)
    prompts = [shared + stories(40, seed=3), shared + stories(44, seed=4)]
    table = new_table(
        f"2  Two prompts with {SHARED_TOKENS} tokens in common, and a store; prefill {name_of(PREFILL)}, decode {name_of(DECODE)}",
        *("tokens", "computed by prefill", "bytes handed over", "decode took from store", "bytes from the store"),
        *("KV cache", "largest difference", "logits"),
    )
    with (
        stage.executor("prefill-store", PREFILL, master=master) as prefill,
        stage.executor("decode-store", DECODE, order="NHD", master=master) as decode,
    ):
        decode.connect(prefill)
        outcomes = [_outcome(stage, f"prompt {number}".encode(), prompt, prefill, decode) for number, prompt in enumerate(prompts)]
        suffix_tokens = len(prompts[1]) - SHARED_TOKENS
        suffix_bytes = decode.cache_bytes(suffix_tokens)
    for prompt, (handed, is_same, distance) in zip(prompts, outcomes, strict=True):
        table.add_row(
            *(
                f"{len(prompt)}",
                f"{handed.computed_tokens}",
                f"{handed.moved_bytes:,}",
                f"{handed.store_tokens}",
                f"{handed.store_bytes:,}",
            ),
            *(bits(is_same), f"{distance.to_single:.1e}", distance.verdict),
        )
    stage.console.print(table)
    handed = outcomes[1][0]
    stage.claim("of the second prompt only the suffix was computed", handed.computed_tokens == suffix_tokens)
    is_only_suffix = (handed.store_tokens, handed.moved_bytes) == (SHARED_TOKENS, suffix_bytes)
    stage.claim("decode took the prefix from the store, and only the suffix was sent to it", is_only_suffix)
    stage.claim("decode's ranks have, to the bit, what prefill's ranks have", all(is_same for _, is_same, _ in outcomes))
    stage.claim_rounding([distance for _, _, distance in outcomes])


def _outcome(stage: Stage, request: bytes, prompt: list[int], prefill: Executor, decode: Executor) -> tuple[HandedOver, bool, Distance]:
    """A request; its blocks are in the store then."""
    count = stage.scale.decoded_tokens
    handed = hand_over(request, prompt, prefill, decode, more_tokens=count, uses_store=True)
    prefill.ranks.call("put", request, prompt)
    is_same = is_equal(request, prefill, decode)
    return handed, is_same, stage.distance(prompt, continued(request, handed, decode, count))
