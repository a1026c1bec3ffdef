"""Shared code of the parts of the demonstration: the reference, executors over one model, tables, and claims that are checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from disaggregation.executor import Executor, HandedOver
from disaggregation.measures import ROUNDING_FACTOR, Distance, Logits, distance
from disaggregation.workers import Workers
from rich.console import Console
from rich.table import Table

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec

SPEC: Final = CacheSpec(layers=4, heads=8, kv_heads=2, head_dim=32, dtype="float32", block_tokens=16, model="small-llama")
"""Of llama.configuration: 2 KiB a token."""
PREFILL: Final = Parallel(tp=2, pp=2)
POOL_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of the demonstration."""

    training_steps: int
    decoded_tokens: int
    schemes: tuple[str, ...]
    texts: int


@dataclass(slots=True, kw_only=True)
class Stage:
    """`is_right` tells at the end whether all that was claimed held."""

    console: Console
    scale: Scale
    single: Workers
    """One process with the whole model."""
    weights: Path
    folder: Path
    is_right: bool = True

    def executor(self, name: str, parallel: Parallel, *, spec: CacheSpec = SPEC, order: str = "HND", master: str = "") -> Executor:
        layout = CacheLayout(spec=spec, parallel=parallel, pool_blocks=POOL_BLOCKS, order=order)
        return Executor(name, layout, weights=self.weights, folder=self.folder, master=master)

    def claim(self, text: str, holds: bool) -> None:
        self.console.print(f"   {'✔' if holds else '✘ NOT SO:'} {text}", style="" if holds else "bold red", highlight=False)
        self.is_right = self.is_right and holds

    def claim_rounding(self, distances: Sequence[Distance]) -> None:
        worst = max(distance.to_exact / distance.allowed for distance in distances) * ROUNDING_FACTOR
        self.claim(
            f"others are sums in another order: at most {worst:.1f} times as far from float64 as one process in float32 "
            f"({ROUNDING_FACTOR:g} times allowed)",
            worst <= ROUNDING_FACTOR,
        )

    def distance(self, prompt: list[int], logits: Logits) -> Distance:
        """Of `continued` to what one process computes of the same tokens, those after the prompt given one at a time."""
        chosen = logits.argmax(-1)[:-1].tolist()
        single, exact = self.single.call("logits", [prompt, *([token] for token in chosen)])[0]
        return distance(logits, single[len(prompt) - 1 :], exact[len(prompt) - 1 :])


def continued(request: bytes, handed: HandedOver, executor: Executor, count: int) -> Logits:
    """The logits of the prompt's last token, and of `count` tokens decoded greedily by `executor`."""
    last = handed.logits[-1:]
    return np.concatenate([last, executor.decode(request, int(last.argmax()), count)])


def name_of(parallel: Parallel) -> str:
    return f"TP {parallel.tp}" + (f" x PP {parallel.pp}" if parallel.pp > 1 else "")


def bits(is_equal: bool) -> str:
    return "bit-equal" if is_equal else "DIFFERENT"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table
