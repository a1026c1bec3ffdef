"""`kvstore plan`: capacity planning: users per GPU set, gain from lower tiers, and strategies for a full cache."""

from dataclasses import asdict, replace
from typing import Any, Final

import click

from kvstore.cli.options import console, echo_json, json_option
from kvstore.cli.plan_report import draw, plan_table
from kvstore.cli.tools.capacity_plan import (
    CapacityPlan,
    PlanInputs,
    TraceHits,
    blocks_of,
    levels,
    make_plan,
    outcomes_of,
    trace_hits,
    users_in_hbm,
)
from kvstore.cli.tools.tables import progress
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.models.spec import DEFAULT_BLOCK_TOKENS, CacheSpec
from kvstore.kvcache.traces.kv_events import read_prompts
from kvstore.kvcache.traces.named import read_requests
from kvstore.lab.pressure.load import UserLoad
from kvstore.lab.pressure.strategies import LowerTier
from kvstore.lab.simulator.simulation import LOAD_BYTES_PER_S
from kvstore.protocol.errors import TraceError
from kvstore.protocol.settings import parse_size
from kvstore.scheduler.estimators.analytic import DEFAULT_HBM_EFFICIENCY, DEFAULT_MFU, find_gpu

MIN_COLUMNS: Final = 100


@click.command(short_help="Plan capacity of HBM, DRAM and NVMe for a model.")
@click.option("--model", required=True, metavar="NAME", help="A known model, or a config.json of Hugging Face.")
@click.option("--gpu", required=True, metavar="NAME", help="A known GPU, or a JSON file of its figures.")
@click.option(
    "--tp", default=1, type=click.IntRange(min=1), show_default=True, metavar="N", help="Tensor parallelism: GPUs that share the heads."
)
@click.option(
    "--pp",
    default=1,
    type=click.IntRange(min=1),
    show_default=True,
    metavar="N",
    help="Pipeline parallelism: stages that share the layers.",
)
@click.option("--users", default=10, show_default=True, metavar="N", help="Concurrent users.")
@click.option("--context", default=5000, show_default=True, metavar="TOKENS", help="Length of a user's prompt.")
@click.option("--output-tokens", default=256, show_default=True, metavar="N", help="Length of a response.")
@click.option("--spread", default=0.25, show_default=True, metavar="SHARE", help="Largest deviation of prompts and responses from these.")
@click.option("--think-s", default=10.0, show_default=True, metavar="SECONDS", help="Mean time from a response to the next prompt.")
@click.option("--duration-s", default=600.0, show_default=True, metavar="SECONDS", help="Simulated time.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the simulated users.")
@click.option("--dtype", metavar="NAME", help="Type of the cache's elements.  [default: the model's]")
@click.option("--scheme", default="none", show_default=True, metavar="NAME", help="Quantisation of K and V: fp8-head, int8, int4/64, ...")
@click.option("--block-tokens", metavar="N", type=click.IntRange(min=1), help="Tokens per block.  [default: 16, or the scheme's group]")
@click.option("--weight-bits", metavar="N", type=click.IntRange(1, 64), help="Bits per weight of the layers.  [default: the model's]")
@click.option("--weights", metavar="SIZE", help="Size of the model's weights.  [default: sum of its matrices]")
@click.option("--reserve", default="2GB", show_default=True, metavar="SIZE", help="Memory of each GPU for activations and the runtime.")
@click.option("--dram", default="256GiB", show_default=True, metavar="SIZE", help="Host DRAM for KV cache. 0: none.")
@click.option("--nvme", default="2TiB", show_default=True, metavar="SIZE", help="Host NVMe for KV cache. 0: none.")
@click.option("--dram-bandwidth", metavar="SIZE", help="Bytes/s from DRAM to all GPUs.  [default: 25GB a GPU]")
@click.option("--nvme-bandwidth", default="6GB", show_default=True, metavar="SIZE", help="Bytes/s from NVMe to the GPUs.")
@click.option("--nic", metavar="SIZE", help="Bytes/s from other nodes.  [default: by GPU]")
@click.option("--mfu", default=DEFAULT_MFU, show_default=True, metavar="SHARE", help="Share of peak FLOPS that prefill reaches.")
@click.option(
    "--hbm-efficiency",
    default=DEFAULT_HBM_EFFICIENCY,
    show_default=True,
    metavar="SHARE",
    help="Share of the HBM bandwidth that decode reaches.",
)
@click.option("--trace", metavar="TRACE", help="File, or generated:SEED:COUNT, to compute prefix hit ratios for.")
@click.option("--limit", type=click.IntRange(min=1), help="Replay only this many of its requests, from the first.")
@click.option("--plots", metavar="DIR", help="Write charts to this folder. Needs the extra `plots`.")
@click.option("--plot-format", type=click.Choice(["svg", "png"]), default="svg", show_default=True, help="Format of the charts.")
@json_option
def plan(trace: str | None, limit: int | None, plots: str | None, plot_format: str, as_json: bool, **options: Any) -> None:
    """Plan the capacity of a model on these GPUs.

    \b
    users      how many fit in HBM, and with DRAM and NVMe
    reuse      bandwidth above which fetching a prefix beats computing it
    when full  outcome of requests under each strategy for a full cache

    Sizes follow from the model's configuration. Times come from an analytic model of dense models; nothing is measured.
    """
    found = make_plan(_setup(options))
    hits = [] if trace is None else _replay(found, trace, limit)
    if plots is not None:
        outcomes = {users: outcomes_of(found.setup, users) for users in levels(found.setup.load.users)}
        for path in draw(found, outcomes, hits, plots, plot_format):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        echo_json(_json(found, hits))
    else:
        # On a narrower console rich would split words and figures; the terminal folds long lines instead.
        out = console()
        out.width = max(MIN_COLUMNS, out.width)
        out.print(plan_table(found, hits))


def _setup(options: dict[str, Any]) -> PlanInputs:
    """Raises ConfigError for an unknown name or a malformed size, InvalidArgument for a figure out of range."""
    model, gpu, scheme = find_model(options["model"]), find_gpu(options["gpu"]), CacheScheme.parse(options["scheme"])
    model = replace(model, weight_bits=options["weight_bits"] or model.weight_bits)
    gpus = options["tp"] * options["pp"]
    block_tokens = options["block_tokens"] or max(DEFAULT_BLOCK_TOKENS, scheme.k.group)
    return PlanInputs(
        model=model,
        gpu=gpu,
        spec=CacheSpec.of_model(model, block_tokens=block_tokens, dtype=options["dtype"] or "", scheme=scheme),
        load=UserLoad(
            users=options["users"],
            context_tokens=options["context"],
            output_tokens=options["output_tokens"],
            spread=options["spread"],
            think_s=options["think_s"],
            duration_s=options["duration_s"],
        ),
        lower_tiers=[
            *_tier("DRAM", options["dram"], _rate(options["dram_bandwidth"], LOAD_BYTES_PER_S * gpus)),
            *_tier("NVMe", options["nvme"], parse_size(options["nvme_bandwidth"])),
        ],
        nic_bytes_per_s=_rate(options["nic"], gpu.nic_bytes_per_s * gpus),
        weight_bytes=0 if options["weights"] is None else parse_size(options["weights"]),
        reserve_bytes=parse_size(options["reserve"]),
        **{name: options[name] for name in ("tp", "pp", "mfu", "hbm_efficiency", "seed")},
    )


def _tier(name: str, size: str, bytes_per_s: float) -> list[LowerTier]:
    """The tier, or an empty list for size 0."""
    size_bytes = parse_size(size)
    return [LowerTier(name=name, capacity_bytes=size_bytes, bytes_per_s=bytes_per_s)] if size_bytes else []


def _rate(text: str | None, default: float) -> float:
    return default if text is None else parse_size(text)


def _replay(plan: CapacityPlan, trace: str, limit: int | None) -> list[TraceHits]:
    """Raises TraceError for a trace that cannot be read or has no blocks."""
    requests = list(read_requests(trace, limit=limit, read_file=read_prompts))
    if not any(request.hash_ids for request in requests):
        raise TraceError(f"the trace {trace} has no blocks: there is nothing to replay")
    with progress("replaying", len(blocks_of(plan))) as on_done:
        return trace_hits(plan, requests, on_done=on_done)


def _json(plan: CapacityPlan, hits: list[TraceHits]) -> dict[str, Any]:
    """Sizes in bytes, times in seconds."""
    setup, hbm, spec = plan.setup, plan.hbm, plan.setup.spec
    return {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "tp": hbm.tp,
        "pp": hbm.pp,
        "scheme": spec.scheme.name,
        "kv_bytes_per_token": spec.bytes_per_token,
        "payload_bytes_per_token": spec.payload_bytes / spec.block_tokens,
        "metadata_bytes_per_token": spec.metadata_bytes / spec.block_tokens,
        "effective_bits": spec.effective_bits,
        "per_gpu": {
            "hbm_bytes": hbm.hbm_bytes,
            "weight_bytes": hbm.weight_bytes,
            "reserve_bytes": hbm.reserve_bytes,
            "kv_bytes": hbm.kv_bytes,
            "kv_bytes_per_token": hbm.kv_bytes_per_token,
        },
        "users": setup.load.users,
        "users_in_hbm": users_in_hbm(plan),
        "tiers": [asdict(tier) for tier in plan.tiers],
        "trace": [asdict(each) for each in hits],
        "reuse": [{**asdict(row), "pays": {name: row.pays(name) for name in row.fetch_s}} for row in plan.reuse],
        "strategies": [outcome.as_dict() for outcome in plan.outcomes],
        "no_times": plan.no_times,
    }
