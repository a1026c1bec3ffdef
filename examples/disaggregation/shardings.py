"""Part 1 of the demonstration: a prompt, prefilled in one executor and decoded in others of other shardings, orders and block sizes."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from disaggregation.executor import Executor, HandedOver, hand_over, is_equal
from disaggregation.measures import Distance, Logits
from disaggregation.stage import PREFILL, SPEC, Stage, bits, continued, name_of, new_table
from disaggregation.story import stories

from kvstore.kvcache.layouts.parallel import Parallel

PROMPT_TOKENS: Final = 500
"""Not a multiple of the blocks: the last one is handed over in part."""


@dataclass(frozen=True, slots=True)
class Case:
    """Prefill has blocks of 16 tokens, heads outside of tokens (HND)."""

    prefill: Parallel
    decode: Parallel
    block_tokens: int
    order: str


CASES: Final = (
    Case(Parallel(pp=2), Parallel(), 16, "HND"),
    Case(PREFILL, Parallel(), 16, "HND"),
    Case(PREFILL, Parallel(tp=2), 16, "NHD"),
    Case(PREFILL, Parallel(tp=4), 32, "NHD"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a case."""

    handed: HandedOver
    is_equal: bool
    """The decode ranks have what prefill computed, to the bit."""
    logits: Logits
    alike: Logits | None
    """Logits of the prefill executor when it continues alone, if both have the same TP."""
    distance: Distance


def show_shardings(stage: Stage) -> None:
    table = new_table(
        f"1  A prompt of {PROMPT_TOKENS} tokens prefilled in one executor, {stage.scale.decoded_tokens} tokens decoded in another",
        *("prefill", "decode", "decode's blocks", "tokens computed", "bytes handed over", "while computing", "KV cache"),
        *("largest difference", "logits"),
    )
    outcomes = dict(zip(CASES, _outcomes(stage), strict=True))
    for case, outcome in outcomes.items():
        handed = outcome.handed
        share = handed.overlap_bytes / handed.moved_bytes
        table.add_row(
            *(name_of(case.prefill), name_of(case.decode), f"{case.block_tokens} tokens, {case.order}", f"{handed.computed_tokens}"),
            *(f"{handed.moved_bytes:,}", f"{share:.0%}", bits(outcome.is_equal)),
            *(f"{outcome.distance.to_single:.1e}", outcome.distance.verdict),
        )
    stage.console.print(table)
    stage.console.print(
        "   while computing: before their rank had computed the last of its two layers, so 50% at the most", highlight=False
    )
    stage.claim(
        "every decode rank has, to the bit, the keys and values that prefill computed",
        all(outcome.is_equal for outcome in outcomes.values()),
    )
    unsplit = [outcome.distance.to_single for case, outcome in outcomes.items() if case.prefill.tp == case.decode.tp == 1]
    stage.claim("where no sum is split over ranks (TP 1 and TP 1), logits are those of one process to the bit", unsplit == [0.0])
    alike = [np.array_equal(outcome.logits, outcome.alike) for outcome in outcomes.values() if outcome.alike is not None]
    stage.claim("with one TP in both, logits are to the bit those of the prefill executor when it goes on by itself", all(alike))
    stage.claim_rounding([outcome.distance for outcome in outcomes.values()])


def _outcomes(stage: Stage) -> Iterator[Outcome]:
    prompt = stories(PROMPT_TOKENS, seed=1)
    with ExitStack() as stack:
        prefills: dict[Parallel, Executor] = {}
        for number, case in enumerate(CASES):
            if case.prefill not in prefills:
                prefills[case.prefill] = stack.enter_context(stage.executor(f"prefill-{number}", case.prefill))
            spec = replace(SPEC, block_tokens=case.block_tokens)
            with stage.executor(f"decode-{number}", case.decode, spec=spec, order=case.order) as decode:
                yield _outcome(stage, f"request {number}".encode(), prompt, prefills[case.prefill], decode)


def _outcome(stage: Stage, request: bytes, prompt: list[int], prefill: Executor, decode: Executor) -> Outcome:
    count = stage.scale.decoded_tokens
    decode.connect(prefill)
    handed = hand_over(request, prompt, prefill, decode, more_tokens=count)
    is_same_cache = is_equal(request, prefill, decode)
    logits = continued(request, handed, decode, count)
    has_one_tp = prefill.layout.parallel.tp == decode.layout.parallel.tp
    alike = continued(request, handed, prefill, count) if has_one_tp else None
    return Outcome(handed, is_same_cache, logits, alike, stage.distance(prompt, logits))
