"""Prefill in one executor, decode in another of another sharding: a small real Llama on this machine's CPU. Every claim is checked.

    python examples/disaggregated.py [--quick] [--weights FOLDER]

Each rank is a process with its part of the model and a pool of its own. The KV cache goes from pool to pool by `kvstore.handover`, layer
by layer while prefill still runs. Needs `pip install '.[examples]'`.

To read on: llama.py has the model's parts, rank.py what a rank does, executor.py the way of a request, part_*.py what is shown.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from disaggregation.prefix import show_shared_prefix
from disaggregation.schemes import show_schemes
from disaggregation.shardings import show_shardings
from disaggregation.stage import Scale, Stage
from disaggregation.workers import Workers, preload
from rich.console import Console

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster

WEIGHTS: Final = Path(__file__).parent.parent / "build" / "examples"
SEED: Final = 1
WIDTH: Final = 150
"""Width of the tables in columns if the output is not a terminal."""
FULL: Final = Scale(training_steps=200, decoded_tokens=16, schemes=("none", "fp8-head", "int8", "int4/32", "int2/32"), texts=8)
QUICK: Final = Scale(training_steps=40, decoded_tokens=4, schemes=("int8", "int4/32"), texts=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when everything that was claimed held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model that has hardly been trained, fewer tokens, texts and schemes")
    parser.add_argument(
        "--weights", type=Path, default=WEIGHTS, help="folder where the trained model is kept for the next run (build/examples)"
    )
    options = parser.parse_args(arguments)
    if not (find_spec("torch") and find_spec("transformers")):
        parser.error("torch and transformers are missing: pip install '.[examples]'")
    scale = QUICK if options.quick else FULL
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(f"A small Llama, trained for {scale.training_steps} steps unless that was done before", highlight=False)
    preload()
    with ExitStack() as stack:
        # It starts while torch and transformers are imported.
        cluster = stack.enter_context(LocalCluster(ClusterPlan(dram="64MiB", is_private=True), on_log=lambda name, line: None))
        stage = _stage(stack, console, scale, options.weights)
        show_shardings(stage)
        cluster.wait_ready()
        show_shared_prefix(stage, cluster.address)
        show_schemes(stage)
    return 0 if stage.is_right else 1


def _stage(stack: ExitStack, console: Console, scale: Scale, weights: Path) -> Stage:
    """With a trained model; what it needs ends with `stack`."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-example-"))
    single = stack.enter_context(Workers("one-process", [("disaggregation.reference", "WholeModel", {})]))
    model = Path(single.call("train", str(weights), SEED, scale.training_steps)[0])
    return Stage(console=console, scale=scale, single=single, weights=model, folder=Path(folder))


if __name__ == "__main__":
    sys.exit(main())
