"""Tables and charts of a CapacityPlan. Formatting only: all figures are in the plan."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.capacity_plan import CapacityPlan, Reuse, TraceHits, sequence_curve, users_in_hbm
from kvstore.cli.tools.tables import figures_table, percent, seconds
from kvstore.lab.plots import Series, Weight, line_chart, save_all, stacked_bars
from kvstore.lab.pressure.model import LoadOutcome, MeanAndTail
from kvstore.protocol.settings import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Context lengths in tokens of the chart of sequences."""


OVER_USERS: Final[dict[str, tuple[Callable[[LoadOutcome], float], str, str]]] = {
    "ttft": (lambda each: each.ttft.mean_s, "Time to first token of completed requests", "mean TTFT (s)"),
    "latency": (lambda each: each.latency.mean_s, "Time to last token of completed requests", "mean latency (s)"),
    "goodput": (lambda each: each.goodput_tokens_per_s, "Tokens of complete answers", "goodput (tokens/s)"),
    "failed": (lambda each: (each.rejected + each.evicted) / max(each.requests, 1), "Requests rejected or evicted", "share of requests"),
}
"""Charts over the number of users: figure, title and label of the vertical axis of each."""


def plan_table(plan: CapacityPlan, hits: Sequence[TraceHits] = ()) -> RenderableType:
    """Return the whole plan as tables."""
    parts: list[RenderableType] = [_summary(plan), Text(), _tiers(plan)]
    if hits:
        parts += [Text(), _hits(hits)]
    parts += [Text(), _reuse(plan)]
    if plan.outcomes:
        parts += [Text(), _outcomes(plan), Text(), _work(plan.outcomes)]
    if plan.no_times:
        parts += [Text(), Text(plan.no_times, style="yellow")]
    return Group(*parts)


def _summary(plan: CapacityPlan) -> Table:
    setup, hbm, spec = plan.setup, plan.hbm, plan.setup.spec
    per_gpu = " of each GPU" if hbm.gpus > 1 else ""
    table = Table.grid(padding=(0, 2))
    heads = (
        f"{spec.layers} layers x {spec.kv_heads} KV heads x {spec.head_dim} ({spec.attention}), {spec.dtype} stored as {spec.scheme.name}"
    )
    table.add_row("model", f"{setup.model.name}: {heads}")
    if spec.windowed_layers:
        table.add_row("window", f"{spec.windowed_layers} of the layers keep no more than {spec.window_tokens:,} tokens of a sequence")
    table.add_row("GPUs", f"{hbm.gpus} x {setup.gpu.name} (TP {hbm.tp}, PP {hbm.pp}), {format_size(hbm.hbm_bytes)} each")
    stored = f"{spec.effective_bits:.2f} bits an element with {percent(spec.metadata_bytes, spec.block_bytes)} of metadata"
    table.add_row("a token", f"{_size(spec.bytes_per_token)}: {stored}")
    table.add_row("weights", f"{_size(hbm.weight_bytes)}{per_gpu}")
    table.add_row("reserve", f"{_size(hbm.reserve_bytes)}{per_gpu}, for activations and the runtime")
    room = f"{_size(hbm.kv_bytes)}{per_gpu}, where a token takes {_size(hbm.kv_bytes_per_token)}"
    table.add_row("KV cache", f"{room}: {hbm.tokens:,} tokens")
    load = setup.load
    fitting = users_in_hbm(plan)
    text = f"{fitting:,} of {load.users:,} contexts of {load.context_tokens:,} tokens fit in HBM at once"
    table.add_row("users", Text(text, style="green" if fitting == load.users else "yellow"))
    return table


def _tiers(plan: CapacityPlan) -> Group:
    table = figures_table("tier", "size", "tokens", "sequences", "down to here", "x HBM")
    for tier in plan.tiers:
        table.add_row(
            tier.name,
            _size(tier.size_bytes),
            f"{tier.tokens:,}",
            f"{tier.sequences:,}",
            f"{tier.total_sequences:,}",
            f"{tier.factor:,.1f}",
        )
    return Group(f"What fits where, in sequences of {plan.setup.load.context_tokens:,} tokens", table)


def _hits(hits: Sequence[TraceHits]) -> Group:
    table = figures_table("tier", "blocks down to here", "prefix hit ratio", "of it, here")
    for each in hits:
        table.add_row(each.name, f"{each.total_blocks:,}", f"{each.total_ratio:.4f}", f"{each.added_ratio:.4f}")
    return Group("Prefix hits of the trace", table)


def _reuse(plan: CapacityPlan) -> Group:
    """Without times the columns that need them are left out."""
    bandwidths = plan.setup.bandwidths
    sources = [f"{name} {_gb_per_s(bytes_per_s)}" for name, bytes_per_s in bandwidths.items()]
    computing = [] if plan.no_times else ["computed in", "needs", "inequality"]
    table = figures_table("prefix", "bytes", *computing, *sources)
    for row in plan.reuse:
        fetched = [_fetched(row, name) for name in bandwidths]
        table.add_row(f"{row.prefix_tokens:,}", _size(row.size_bytes), *_computed(row), *fetched)
    return Group("Fetching a prefix compared with computing it", table)


def _computed(row: Reuse) -> list[str]:
    """Compute time and break-even bandwidths; empty if times are unknown."""
    if row.compute is None:
        return []
    return [seconds(row.compute.seconds), _gb_per_s(row.compute.needed_bytes_per_s), _gb_per_s(row.compute.inequality_bytes_per_s)]


def _fetched(row: Reuse, source: str) -> Text:
    pays = row.pays(source)
    verdict = {True: ", pays", False: ", no", None: ""}[pays]
    return Text(seconds(row.fetch_s[source]) + verdict, style={True: "green", False: "red", None: ""}[pays])


def _outcomes(plan: CapacityPlan) -> Group:
    load = plan.setup.load
    table = figures_table("when full", "requests", "completed", "failed", "tokens/s", "TTFT", "TTFT p99", "latency", "latency p99")
    for each in plan.outcomes:
        table.add_row(
            each.strategy,
            *(f"{count:,}" for count in (each.requests, each.completed, each.rejected + each.evicted)),
            f"{each.goodput_tokens_per_s:,.1f}",
            *_spreads(each, each.ttft, each.latency),
        )
    asks = f"{load.context_tokens:,} + {load.output_tokens:,} tokens (+-{load.spread:.0%}), {seconds(load.think_s)} of thought"
    return Group(f"{load.users:,} users, {asks}, for {seconds(load.duration_s)}", table)


def _work(outcomes: Sequence[LoadOutcome]) -> Table:
    table = figures_table(
        "when full", "wait", "wait p99", "displaced", "recomputed tokens", "of prefill", "offloaded", "fetched", "copying"
    )
    for each in outcomes:
        table.add_row(
            each.strategy,
            *_spreads(each, each.wait),
            f"{each.displacements:,}",
            f"{each.recomputed_tokens:,}",
            percent(each.recompute_share, 1),
            _size(each.offloaded_bytes),
            _size(each.fetched_bytes),
            seconds(each.copying_s),
        )
    return table


def _spreads(outcome: LoadOutcome, *spreads: MeanAndTail) -> list[str]:
    """Mean and p99 of each; dashes if no request completed."""
    return [seconds(value_s) if outcome.completed else "-" for spread in spreads for value_s in (spread.mean_s, spread.p99_s)]


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes))


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g} GB/s"


def draw(
    plan: CapacityPlan, outcomes: Mapping[int, Sequence[LoadOutcome]], hits: Sequence[TraceHits], folder: str | Path, suffix: str
) -> list[Path]:
    """Write the charts memory, sequences, reuse, ttft, latency, goodput, failed and hits, and return their paths.

    Without times or hits the charts that need them are left out. `outcomes`: number of users -> outcome of every strategy. Raises
    ConfigError if the folder cannot be created or written, or matplotlib is not installed.
    """
    figures = {"memory": _memory_chart(plan), "sequences": _sequences_chart(plan)}
    if not plan.no_times:
        figures["reuse"] = _reuse_chart(plan)
        for name, (figure, title, y_label) in OVER_USERS.items():
            figures[name] = _over_users(outcomes, figure, title, y_label)
    if hits:
        figures["hits"] = _hits_chart(hits)
    return save_all({f"{name}.{suffix}": figure for name, figure in figures.items()}, folder)


def _memory_chart(plan: CapacityPlan) -> "Figure":
    hbm = plan.hbm
    parts = {"weights": hbm.weight_bytes, "reserve": hbm.reserve_bytes, "KV cache": hbm.kv_bytes}
    return stacked_bars(
        [f"{plan.setup.gpu.name}, one of {hbm.gpus}"],
        {name: [size_bytes / 1e9] for name, size_bytes in parts.items()},
        title=f"The memory of a GPU: {plan.setup.model.name}",
        x_label="",
        y_label="bytes (GB)",
    )


def _sequences_chart(plan: CapacityPlan) -> "Figure":
    lines, names = [], []
    for name, counts in sequence_curve(plan.setup, CONTEXTS).items():
        names.append(name)
        # 0 cannot be drawn on a logarithmic axis.
        points = [(tokens, count) for tokens, count in zip(CONTEXTS, counts, strict=True) if count]
        if points:
            lines.append(Series(" + ".join(names), [x for x, _ in points], [y for _, y in points]))
    users = Series("users", list(CONTEXTS), [plan.setup.load.users] * len(CONTEXTS), Weight.BOUND)
    return line_chart(
        [*lines, users],
        title=f"Sequences whose caches fit: {plan.setup.model.name}, {plan.hbm.gpus} x {plan.setup.gpu.name}",
        x_label="context (tokens)",
        y_label="sequences",
        log_x=True,
        log_y=True,
    )


def _reuse_chart(plan: CapacityPlan) -> "Figure":
    tokens = [row.prefix_tokens for row in plan.reuse]
    computed = [row.compute for row in plan.reuse if row.compute is not None]
    lines = [
        Series("layer model", tokens, [row.needed_bytes_per_s / 1e9 for row in computed], Weight.MAIN),
        Series("inequality", tokens, [row.inequality_bytes_per_s / 1e9 for row in computed]),
    ]
    for name, bytes_per_s in plan.setup.bandwidths.items():
        lines.append(Series(name, tokens, [bytes_per_s / 1e9] * len(tokens), Weight.BOUND))
    return line_chart(
        lines,
        title="Bandwidth above which fetching a prefix beats computing it",
        x_label="prefix (tokens)",
        y_label="bandwidth (GB/s)",
        log_x=True,
        log_y=True,
    )


def _over_users(
    outcomes: Mapping[int, Sequence[LoadOutcome]], figure: Callable[[LoadOutcome], float], title: str, y_label: str
) -> "Figure":
    """Chart with one line per strategy."""
    users = sorted(outcomes)
    names = [outcome.strategy for outcome in outcomes[users[0]]]
    lines = [Series(name, users, [figure(outcomes[count][index]) for count in users]) for index, name in enumerate(names)]
    return line_chart(lines, title=title, x_label="users", y_label=y_label)


def _hits_chart(hits: Sequence[TraceHits]) -> "Figure":
    return stacked_bars(
        ["the trace"],
        {each.name: [each.added_ratio] for each in hits},
        title="Prefix hits by tier",
        x_label="",
        y_label="prefix hit ratio (share of blocks)",
    )
