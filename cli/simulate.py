"""`kvstore simulate`: replays a trace through the scheduler into simulated instances; reports tables and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.options import json_option, show
from kvstore.cli.tools.tables import duration, figures_table, percent, progress, seconds
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import read_requests
from kvstore.lab.plots import Series, line_chart, save_all, stacked_bars
from kvstore.lab.simulator.plan import Mode, SimulationPlan
from kvstore.lab.simulator.report import STAGES, DurationSummary, SimulationReport
from kvstore.lab.simulator.simulation import Scenario
from kvstore.protocol.errors import InvalidArgument, TraceError
from kvstore.protocol.settings import format_size, parse_size
from kvstore.scheduler.request import Slo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODE_TITLES: Final = {
    Mode.PREFILL_FIRST: "prefill prioritized",
    Mode.DECODE_FIRST: "decode prioritized",
    Mode.CHUNKED: "chunked prefill",
    Mode.DISAGGREGATED: "P/D disaggregation",
}
"""In the order of the paper's table (see modes_table)."""

CURVE_POINTS: Final = 400
"""Points drawn of a distribution: more are indistinguishable on a chart."""


def report_table(report: SimulationReport) -> RenderableType:
    """Return the report of one simulation as tables."""
    return Group(_counts(report), Text(), _latencies(report), Text(), _pools(report))


def modes_table(reports: Mapping[Mode, SimulationReport]) -> RenderableType:
    """Return TTFT, TBT and MFU of each mode: the paper's table "Serving Scheduling", with figures in place of signs.

    Source: "Mooncake: Trading More Storage for Less Computation", Serving Scheduling - Summary.
    """
    found = figures_table("", *(MODE_TITLES[mode] for mode in MODE_TITLES if mode in reports))
    ordered = [reports[mode] for mode in MODE_TITLES if mode in reports]
    found.add_row("TTFT, mean", *(seconds(report.ttft.mean_s) for report in ordered))
    found.add_row("TTFT, p90", *(seconds(report.ttft.p90_s) for report in ordered))
    found.add_row("TBT, mean", *(seconds(report.tbt.mean_s) for report in ordered))
    found.add_row("TBT, p99", *(seconds(report.tbt.p99_s) for report in ordered))
    found.add_row("TBT of a request, p99", *(seconds(report.token.p99_s) for report in ordered))
    found.add_row("prefill MFU", *(percent(report.prefill_mfu, 1) for report in ordered))
    found.add_row("decode MFU", *(percent(report.decode_mfu, 1) for report in ordered))
    found.add_row("goodput", *(f"{report.goodput_per_s:.2f} /s" for report in ordered))
    return found


def _counts(report: SimulationReport) -> RenderableType:
    rejected = sum(report.rejected.values())
    reasons = ", ".join(f"{count:,} by {reason}" for reason, count in sorted(report.rejected.items()))
    table = Table.grid(padding=(0, 2))
    table.add_row("simulated", f"{report.requests:,} requests in {duration(report.duration_s)}")
    table.add_row("finished", f"{report.finished:,} ({percent(report.finished, report.requests)})")
    table.add_row("rejected", f"{rejected:,} ({percent(rejected, report.requests)})" + (f": {reasons}" if reasons else ""))
    table.add_row("wasted prefills", f"{report.wasted_prefills:,}")
    table.add_row("goodput", f"{report.goodput_per_s:.3f} requests/s within both SLOs ({percent(report.in_time, report.requests)})")
    table.add_row("throughput", f"{report.output_tokens_per_s:,.0f} output tokens/s")
    table.add_row("prefix hit ratio", f"{report.hit_ratio_blocks:.4f} of blocks, {report.hit_ratio_tokens:.4f} of tokens")
    table.add_row("fetched", f"{format_size(report.fetched_bytes)} of prefixes between instances")
    table.add_row("streamed", f"{format_size(report.streamed_bytes)} of KV caches to decode instances")
    table.add_row("loaded", f"{format_size(report.loaded_bytes)} of prefixes from DRAM to GPUs")
    return table


def _latencies(report: SimulationReport) -> RenderableType:
    found = figures_table("", "mean", "p50", "p90", "p99")
    for name, spread in (("TTFT", report.ttft), ("TBT, of tokens", report.tbt), ("TBT, of requests", report.token)):
        found.add_row(name, *map(seconds, _columns(spread)))
    stages = figures_table("stage", *report.stages_s)
    stages.add_row("mean a request", *map(seconds, report.stages_s.values()))
    return Group(found, Text(), stages)


def _pools(report: SimulationReport) -> RenderableType:
    found = figures_table("pool", "busy", "MFU while busy")
    found.add_row("prefill", percent(report.prefill_utilisation, 1), percent(report.prefill_mfu, 1))
    found.add_row("decode", percent(report.decode_utilisation, 1), percent(report.decode_mfu, 1))
    return found


def _columns(spread: DurationSummary) -> tuple[float, float, float, float]:
    return spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s


def draw(reports: Mapping[str, SimulationReport], slo: Slo, folder: str | Path) -> list[Path]:
    """Write ttft.svg, tbt.svg, stages.svg and load.svg, and return their paths.

    Several reports get a load-NAME.svg each. tbt.svg is left out if no request has a second token. `reports`: name in the charts ->
    report. Raises InvalidArgument if no report has a finished request, ConfigError if the folder cannot be created or written, or
    matplotlib is not installed.
    """
    drawn = {name: report for name, report in reports.items() if report.finished}
    if not drawn:
        raise InvalidArgument("no request was finished: there is nothing to draw")
    figures = {"ttft.svg": _curves({name: report.ttft_points for name, report in drawn.items()}, "Time to first token", "TTFT", "requests")}
    if any(report.tbt_points for report in drawn.values()):
        gaps = {name: report.tbt_points for name, report in drawn.items()}
        figures["tbt.svg"] = _curves(gaps, "Time between tokens", "TBT", "tokens")
    figures["stages.svg"] = stacked_bars(
        list(drawn),
        {stage: [report.stages_s[stage] for report in drawn.values()] for stage in STAGES},
        title="Mean time of a request by stage",
        x_label="simulation",
        y_label="mean time a request (s)",
    )
    for name, report in drawn.items():
        figures["load.svg" if len(drawn) == 1 else f"load-{name}.svg"] = _load(report, slo)
    return save_all(figures, folder)


def _curves(points: Mapping[str, Sequence[tuple[float, float]]], title: str, what: str, things: str) -> "Figure":
    """Chart of distributions, with times on a logarithmic axis: a few are a hundred times the median."""
    lines = [Series(name, *thinned(curve)) for name, curve in points.items() if curve]
    return line_chart(lines, title=title, x_label=f"{what} (s)", y_label=f"share of {things} at or below", log_x=True)


def thinned(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return times and shares of about CURVE_POINTS points, the last included, without those at time 0 (logarithmic axis)."""
    step = max(1, len(curve) // CURVE_POINTS)
    kept = [point for number, point in enumerate(curve) if (number % step == 0 or number == len(curve) - 1) and point[0] > 0]
    return [gap_s for gap_s, _ in kept], [share for _, share in kept]


def _load(report: SimulationReport, slo: Slo) -> "Figure":
    """Chart of the load of both pools over time, as a share of the SLO."""
    at_s = [sample.at_s for sample in report.samples]
    lines = [
        Series("prefill", at_s, [sample.prefill_queue_s / slo.ttft_s for sample in report.samples]),
        Series("decode", at_s, [sample.decode_tbt_s / slo.tbt_s for sample in report.samples]),
    ]
    return line_chart(lines, title="Load of the pools", x_label="time (s)", y_label="load (1 = the SLO)")


@click.command(short_help="Simulate a serving cluster on a trace.")
@click.argument("trace", metavar="TRACE")
@click.option(
    "--mode",
    default="disaggregated",
    show_default=True,
    type=click.Choice([mode.value for mode in Mode]),
    help="How prefill and decode share the instances.",
)
@click.option("--prefill", default=8, show_default=True, metavar="N", help="Prefill instances.")
@click.option(
    "--decode", default=8, show_default=True, metavar="N", help="Decode instances. In other modes, instances of one kind: the sum."
)
@click.option("--model", default="llama2-70b", show_default=True, metavar="NAME", help="A known model, or a JSON file of its shape.")
@click.option("--gpu", default="A800", show_default=True, metavar="NAME", help="A known GPU, or a JSON file of its figures.")
@click.option("--gpus-per-instance", "gpus", default=8, show_default=True, metavar="N", help="GPUs per instance.")
@click.option("--mfu", default=0.5, show_default=True, metavar="SHARE", help="Share of peak FLOPS that prefill reaches.")
@click.option("--hbm-efficiency", default=0.8, show_default=True, metavar="SHARE", help="Share of HBM bandwidth that decode reaches.")
@click.option("--bandwidth", metavar="SIZE", help="Bytes/s of an instance's network, as 100GB.  [default: by GPU]")
@click.option("--dispatcher", default="kvcache_centric", show_default=True, metavar="NAME", help="Dispatcher, which chooses instances.")
@click.option("--threshold", default=1.0, show_default=True, metavar="RATIO", help="kvcache_balancing_threshold of kvcache_centric.")
@click.option(
    "--admission",
    default="slo",
    show_default=True,
    metavar="NAME",
    help="slo (Algorithm 1), all, late, early, predicted, predicted_uniform.",
)
@click.option("--load-limit", default=1.0, show_default=True, metavar="SHARE", help="Share of an SLO that late, early and predicted allow.")
@click.option("--cache-blocks", default=6000, show_default=True, metavar="N", help="512-token blocks that an instance's DRAM caches.")
@click.option("--policy", default="lru", show_default=True, metavar="NAME", help="Eviction policy of these caches.")
@click.option("--rate", default=1.0, show_default=True, metavar="FACTOR", help="2: requests arrive twice as fast as recorded.")
@click.option("--ttft-slo-s", default=30.0, show_default=True, metavar="SECONDS", help="SLO of the time to first token.")
@click.option("--tbt-slo-s", default=0.1, show_default=True, metavar="SECONDS", help="SLO of the time between tokens.")
@click.option("--chunk-tokens", default=512, show_default=True, metavar="N", help="Prompt tokens per step, in mode chunked.")
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="Send KV caches during prefill, layer by layer.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of random dispatchers.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only this many requests, from the first.")
@click.option("--compare-modes", is_flag=True, help="Simulate every mode and print TTFT, TBT and MFU side by side.")
@click.option("--plots", metavar="DIR", help="Write charts to this folder. Needs the extra `plots`.")
@json_option
def simulate(trace: str, limit: int | None, compare_modes: bool, plots: str | None, as_json: bool, **options: Any) -> None:
    """Send the requests of TRACE through the scheduler into simulated instances.

    TRACE is a file in the public Mooncake format, or generated:SEED:COUNT for COUNT requests of generated conversations.

    Dispatcher, estimators and admission policy are those of the live scheduler. The times of instances come from an analytic model of the
    language model and the GPU. Equal options give equal results.
    """
    scenario = _scenario(options)
    scenario.simulation()  # validates all options before the trace is read
    requests = list(read_requests(trace, limit=limit))
    if not requests:
        raise TraceError(f"{trace} has no requests")
    modes = list(MODE_TITLES) if compare_modes else [scenario.plan.mode]
    reports = _run(scenario, modes, requests)
    if plots is not None:
        for path in draw({mode.value: report for mode, report in reports.items()}, scenario.plan.slo, plots):
            click.echo(f"wrote {path}", err=True)
    if compare_modes:
        show({mode.value: report.as_dict() for mode, report in reports.items()}, lambda: modes_table(reports), as_json=as_json)
    else:
        (report,) = reports.values()
        show(report.as_dict(), lambda: report_table(report), as_json=as_json)


def _scenario(options: dict[str, Any]) -> Scenario:
    slo = Slo(options.pop("ttft_slo_s"), options.pop("tbt_slo_s"))
    names = ("prefill", "decode", "cache_blocks", "policy", "rate", "chunk_tokens", "overlap")
    plan = SimulationPlan(mode=Mode(options.pop("mode")), slo=slo, **{name: options.pop(name) for name in names})
    bandwidth = options.pop("bandwidth")
    return Scenario(plan=plan, send_bytes_per_s=None if bandwidth is None else parse_size(bandwidth), **options)


def _run(scenario: Scenario, modes: Sequence[Mode], requests: Sequence[TraceRequest]) -> dict[Mode, SimulationReport]:
    with progress("simulating", len(modes) * len(requests)) as on_progress:
        return {mode: replace(scenario, plan=replace(scenario.plan, mode=mode)).run(requests, on_progress=on_progress) for mode in modes}
