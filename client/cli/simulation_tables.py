"""A simulation's report, and several side by side, as tables for people. Pure: from figures to something that rich prints."""

from collections.abc import Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.client.tools.status_tables import duration, percent
from kvstore.protocol.settings import format_size
from kvstore.scheduler.simulator.plan import Mode
from kvstore.scheduler.simulator.report import Report, Spread

MODE_TITLES: Final = {
    Mode.PREFILL_FIRST: "prefill prioritized",
    Mode.DECODE_FIRST: "decode prioritized",
    Mode.CHUNKED: "chunked prefill",
    Mode.DISAGGREGATED: "P/D disaggregation",
}
"""In the order of the table that is redrawn."""


def report_table(report: Report) -> RenderableType:
    """One simulation in a screenful."""
    return Group(_counts(report), Text(), _latencies(report), Text(), _pools(report))


def modes_table(reports: Mapping[Mode, Report]) -> RenderableType:
    """TTFT, TBT and MFU of each mode: the table "Serving Scheduling", with figures for its signs.

    Source: "Mooncake: Trading More Storage for Less Computation", Serving Scheduling - Summary.
    """
    found = _titled("", *(MODE_TITLES[mode] for mode in MODE_TITLES if mode in reports))
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


def seconds(value_s: float) -> str:
    """`850 us`, `12.3 ms`, `1.27 s`, `105 s`."""
    if value_s < 0.001:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    return f"{value_s:.2f} s" if value_s < 100 else f"{value_s:.0f} s"


def _counts(report: Report) -> RenderableType:
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
    table.add_row("streamed", f"{format_size(report.streamed_bytes)} of KV caches to where they are decoded")
    table.add_row("loaded", f"{format_size(report.loaded_bytes)} of prefixes from DRAM to GPUs")
    return table


def _latencies(report: Report) -> RenderableType:
    found = _titled("", "mean", "p50", "p90", "p99")
    for name, spread in (("TTFT", report.ttft), ("TBT, of tokens", report.tbt), ("TBT, of requests", report.token)):
        found.add_row(name, *map(seconds, _columns(spread)))
    stages = _titled("stage", *report.stages_s)
    stages.add_row("mean a request", *map(seconds, report.stages_s.values()))
    return Group(found, Text(), stages)


def _pools(report: Report) -> RenderableType:
    found = _titled("pool", "busy", "MFU while busy")
    found.add_row("prefill", percent(report.prefill_utilisation, 1), percent(report.prefill_mfu, 1))
    found.add_row("decode", percent(report.decode_utilisation, 1), percent(report.decode_mfu, 1))
    return found


def _columns(spread: Spread) -> tuple[float, float, float, float]:
    return spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s


def _titled(first: str, *titles: str) -> Table:
    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column(first)
    for title in titles:
        found.add_column(title, justify="right")
    return found
