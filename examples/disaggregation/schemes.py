"""Part 3 of the demonstration: blocks that are quantised before the hand-over, and the effect on predictions.

Each text ends in the middle of a story, after its facts. The decode executor has the facts from quantised blocks only, and predicts their
repetition. It does not quantise the cache that it computes itself.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from disaggregation.executor import Executor, hand_over, is_equal
from disaggregation.measures import Damage, Logits
from disaggregation.stage import PREFILL, SPEC, Stage, bits, name_of, new_table
from disaggregation.story import half_told

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec

CONTEXT_TOKENS: Final = 256
BLOCK_TOKENS: Final = 32
DECODE: Final = Parallel()
Text = tuple[list[int], list[int]]
"""Tokens that are handed over, and the tokens after them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a scheme, all texts together."""

    moved_bytes: int
    is_equal: bool
    """Decode's records are prefill's, to the bit."""
    logits: Logits


def show_schemes(stage: Stage) -> None:
    texts = [half_told(seed, context_tokens=CONTEXT_TOKENS) for seed in range(stage.scale.texts)]
    predicted = [token for _, rest in texts for token in rest[1:]]
    table = new_table(
        f"3  {len(texts)} texts, of each {CONTEXT_TOKENS} tokens handed over ({name_of(PREFILL)} to {name_of(DECODE)}, "
        f"blocks of {BLOCK_TOKENS}), the {len(predicted)} behind them predicted",
        *("scheme", "bits an element", "bytes handed over", "records", "largest logit error", "mean", "KL divergence, nats", "same choice"),
        "perplexity",
    )
    reference = np.concatenate([_single_logits(stage, context, rest) for context, rest in texts])
    outcomes = {name: _outcome(stage, f"q{number}", _spec(name), texts) for number, name in enumerate(stage.scale.schemes)}
    damages = {name: Damage.of(outcome.logits, reference, predicted) for name, outcome in outcomes.items()}
    for name, outcome in outcomes.items():
        facts = (f"{_spec(name).effective_bits:g}", f"{outcome.moved_bytes:,}", bits(outcome.is_equal))
        table.add_row(name, *facts, *_cells(damages[name]))
    without = Damage.of(np.concatenate([_single_logits(stage, [], rest) for _, rest in texts]), reference, predicted)
    table.add_row("no context", "", "0", "", *_cells(without))
    stage.console.print(table)
    stage.claim(
        "records arrive, to the bit, as prefill's ranks made them: other heads in a rank, and nothing decoded on the way",
        all(outcome.is_equal for outcome in outcomes.values()),
    )
    errors = [damages["int8"].mean_logit_error, damages["int4/32"].mean_logit_error, without.mean_logit_error]
    stage.claim("fewer bits, larger errors: int8 < int4/32 < no context", errors == sorted(errors))


def _spec(scheme: str) -> CacheSpec:
    return replace(SPEC, block_tokens=BLOCK_TOKENS, scheme=CacheScheme.parse(scheme))


def _cells(damage: Damage) -> list[str]:
    return [
        *(f"{damage.max_logit_error:.1e}", f"{damage.mean_logit_error:.1e}", f"{damage.kl_nats:.1e}", f"{damage.same_choice:.1%}"),
        f"{damage.perplexity:.4f}",
    ]


def _single_logits(stage: Stage, context: list[int], rest: list[int]) -> Logits:
    """Of one process in float32: what it predicts after each token of `rest` but the last."""
    logits: Logits = stage.single.call("logits", [context, rest[:-1]] if context else [rest[:-1]])[0][0]
    return logits[len(context) :]


def _outcome(stage: Stage, name: str, spec: CacheSpec, texts: list[Text]) -> Outcome:
    with (
        stage.executor(f"prefill-{name}", PREFILL, spec=spec) as prefill,
        stage.executor(f"decode-{name}", DECODE, spec=spec) as decode,
    ):
        decode.connect(prefill)
        made = [_predicted(f"text {number}".encode(), text, prefill, decode) for number, text in enumerate(texts)]
    return Outcome(
        sum(outcome.moved_bytes for outcome in made),
        all(outcome.is_equal for outcome in made),
        np.concatenate([outcome.logits for outcome in made]),
    )


def _predicted(request: bytes, text: Text, prefill: Executor, decode: Executor) -> Outcome:
    """Of one text: its context handed over, and what follows predicted."""
    context, rest = text
    handed = hand_over(request, context, prefill, decode, more_tokens=len(rest))
    is_same = is_equal(request, prefill, decode)
    logits = decode.forward(request, rest[:-1])
    for executor in (prefill, decode):
        executor.ranks.call("end", request)
    return Outcome(handed.moved_bytes, is_same, logits)
