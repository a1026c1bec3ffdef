"""`kvstore simulate`: a trace through the scheduler into a cluster that exists as a model only."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.client.cli.options import console, echo_json, json_option
from kvstore.client.cli.simulation_figures import draw
from kvstore.client.cli.simulation_tables import MODE_TITLES, modes_table, report_table
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import read_requests
from kvstore.protocol.errors import TraceError
from kvstore.protocol.settings import parse_size
from kvstore.scheduler.request import Slo
from kvstore.scheduler.simulator.plan import Mode, Plan
from kvstore.scheduler.simulator.report import Report
from kvstore.scheduler.simulator.simulation import Scenario


@click.command(short_help="Simulate a serving cluster on a trace.")
@click.argument("trace", metavar="TRACE")
@click.option("--mode", default="disaggregated", show_default=True, type=click.Choice([mode.value for mode in Mode]), help="Who does what.")
@click.option("--prefill", default=8, show_default=True, metavar="N", help="Prefill instances.")
@click.option(
    "--decode", default=8, show_default=True, metavar="N", help="Decode instances. In other modes, instances of one kind: the sum."
)
@click.option("--model", default="llama2-70b", show_default=True, metavar="NAME", help="A known model, or a JSON file of its shape.")
@click.option("--gpu", default="A800", show_default=True, metavar="NAME", help="A known GPU, or a JSON file of its figures.")
@click.option("--gpus-per-instance", "gpus", default=8, show_default=True, metavar="N", help="GPUs that hold one copy of the model.")
@click.option("--mfu", default=0.5, show_default=True, metavar="SHARE", help="Of the peak, what prefill reaches.")
@click.option("--hbm-efficiency", default=0.8, show_default=True, metavar="SHARE", help="Of the HBM bandwidth, what decode reaches.")
@click.option("--bandwidth", metavar="SIZE", help="Bytes/s of an instance's network, as 100GB.  [default: by GPU]")
@click.option("--dispatcher", default="kvcache_centric", show_default=True, metavar="NAME", help="Who chooses instances.")
@click.option("--threshold", default=1.0, show_default=True, metavar="RATIO", help="kvcache_balancing_threshold of kvcache_centric.")
@click.option(
    "--admission",
    default="slo",
    show_default=True,
    metavar="NAME",
    help="slo (Algorithm 1), all, late, early, predicted, predicted_uniform.",
)
@click.option("--load-limit", default=1.0, show_default=True, metavar="SHARE", help="Of an SLO, what late, early and predicted allow.")
@click.option("--cache-blocks", default=6000, show_default=True, metavar="N", help="512-token blocks that an instance's DRAM caches.")
@click.option("--policy", default="lru", show_default=True, metavar="NAME", help="Eviction policy of these caches.")
@click.option("--rate", default=1.0, show_default=True, metavar="FACTOR", help="2: requests arrive twice as fast as recorded.")
@click.option("--ttft-slo-s", default=30.0, show_default=True, metavar="SECONDS", help="Time to the first token that is promised.")
@click.option("--tbt-slo-s", default=0.1, show_default=True, metavar="SECONDS", help="Time between tokens that is promised.")
@click.option("--chunk-tokens", default=512, show_default=True, metavar="N", help="Of a prompt in a step, in mode chunked.")
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="Send KV caches during prefill, layer by layer.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of dispatchers that draw.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests.")
@click.option("--compare-modes", is_flag=True, help="Simulate every mode and print TTFT, TBT and MFU side by side.")
@click.option("--plots", metavar="DIR", help="Write charts to this folder. Needs the extra `plots`.")
@json_option
def simulate(trace: str, limit: int | None, compare_modes: bool, plots: str | None, as_json: bool, **options: Any) -> None:
    """Send the requests of TRACE through the scheduler into simulated instances.

    TRACE is a file in the public Mooncake format, or generated:SEED:COUNT for so many requests of generated conversations.

    The dispatcher, its estimators and the admission policy are those that run live; instances take the time that an analytic model of
    the language model and the GPU says. Equal options give equal results.
    """
    scenario = _scenario(options)
    scenario.simulation()  # Everything but the trace is known to be right before the trace is read.
    requests = list(read_requests(trace, limit=limit))
    if not requests:
        raise TraceError(f"{trace} has no requests")
    modes = list(MODE_TITLES) if compare_modes else [scenario.plan.mode]
    reports = _run(scenario, modes, requests)
    if plots is not None:
        for path in draw({mode.value: report for mode, report in reports.items()}, scenario.plan.slo, plots):
            click.echo(f"wrote {path}", err=True)
    if as_json:
        found = {mode.value: report.as_dict() for mode, report in reports.items()}
        echo_json(found if compare_modes else found[scenario.plan.mode.value])
    else:
        console().print(modes_table(reports) if compare_modes else report_table(reports[scenario.plan.mode]))


def _scenario(options: dict[str, Any]) -> Scenario:
    slo = Slo(options.pop("ttft_slo_s"), options.pop("tbt_slo_s"))
    names = ("prefill", "decode", "cache_blocks", "policy", "rate", "chunk_tokens", "overlap")
    plan = Plan(mode=Mode(options.pop("mode")), slo=slo, **{name: options.pop(name) for name in names})
    bandwidth = options.pop("bandwidth")
    return Scenario(plan=plan, send_bytes_per_s=None if bandwidth is None else parse_size(bandwidth), **options)


def _run(scenario: Scenario, modes: Sequence[Mode], requests: Sequence[TraceRequest]) -> dict[Mode, Report]:
    with progress(len(modes) * len(requests)) as on_progress:
        return {mode: replace(scenario, plan=replace(scenario.plan, mode=mode)).run(requests, on_progress=on_progress) for mode in modes}


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal; gives what is to be called for each request."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("simulate", total=total)
        yield lambda: bar.update(task, advance=1)
