"""A plan as tables for people. Pure: from figures to something that rich prints."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.client.cli.simulation_tables import seconds
from kvstore.client.tools.plan_trace import TraceHits
from kvstore.client.tools.planning import Plan, Reuse, users_in_hbm
from kvstore.client.tools.status_tables import percent
from kvstore.protocol.settings import format_size
from kvstore.scheduler.pressure.model import MeanAndTail, Outcome


def plan_table(plan: Plan, hits: Sequence[TraceHits] = ()) -> RenderableType:
    """All of it, in two screenfuls."""
    parts: list[RenderableType] = [_summary(plan), Text(), _tiers(plan)]
    if hits:
        parts += [Text(), _hits(hits)]
    parts += [Text(), _reuse(plan)]
    if plan.outcomes:
        parts += [Text(), _outcomes(plan), Text(), _work(plan.outcomes)]
    if plan.no_times:
        parts += [Text(), Text(plan.no_times, style="yellow")]
    return Group(*parts)


def _summary(plan: Plan) -> Table:
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


def _tiers(plan: Plan) -> Group:
    table = _titled("tier", "size", "tokens", "sequences", "down to here", "x HBM")
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
    table = _titled("tier", "blocks down to here", "prefix hit ratio", "of it, here")
    for each in hits:
        table.add_row(each.name, f"{each.total_blocks:,}", f"{each.total_ratio:.4f}", f"{each.added_ratio:.4f}")
    return Group("What of the trace's prompts is in the cache", table)


def _reuse(plan: Plan) -> Group:
    """Where times are unknown the columns that need them are left out."""
    bandwidths = plan.setup.bandwidths
    sources = [f"{name} {_gb_per_s(bytes_per_s)}" for name, bytes_per_s in bandwidths.items()]
    computing = [] if plan.no_times else ["computed in", "needs", "inequality"]
    table = _titled("prefix", "bytes", *computing, *sources)
    for row in plan.reuse:
        fetched = [_fetched(row, name) for name in bandwidths]
        table.add_row(f"{row.prefix_tokens:,}", _size(row.size_bytes), *_computed(row), *fetched)
    return Group("To fetch a prefix or to compute it", table)


def _computed(row: Reuse) -> list[str]:
    """How long, and the bandwidths that would be as good; nothing where that is not known."""
    if row.compute is None:
        return []
    return [seconds(row.compute.seconds), _gb_per_s(row.compute.needed_bytes_per_s), _gb_per_s(row.compute.inequality_bytes_per_s)]


def _fetched(row: Reuse, source: str) -> Text:
    pays = row.pays(source)
    verdict = {True: ", pays", False: ", no", None: ""}[pays]
    return Text(seconds(row.fetch_s[source]) + verdict, style={True: "green", False: "red", None: ""}[pays])


def _outcomes(plan: Plan) -> Group:
    load = plan.setup.load
    table = _titled("when full", "requests", "completed", "failed", "tokens/s", "TTFT", "TTFT p99", "latency", "latency p99")
    for each in plan.outcomes:
        table.add_row(
            each.strategy,
            *(f"{count:,}" for count in (each.requests, each.completed, each.rejected + each.evicted)),
            f"{each.goodput_tokens_per_s:,.1f}",
            *_spreads(each, each.ttft, each.latency),
        )
    asks = f"{load.context_tokens:,} + {load.output_tokens:,} tokens (+-{load.spread:.0%}), {seconds(load.think_s)} of thought"
    return Group(f"{load.users:,} users, {asks}, for {seconds(load.duration_s)}", table)


def _work(outcomes: Sequence[Outcome]) -> Table:
    table = _titled("when full", "wait", "wait p99", "displaced", "recomputed tokens", "of prefill", "offloaded", "fetched", "copying")
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


def _spreads(outcome: Outcome, *spreads: MeanAndTail) -> list[str]:
    """Mean and p99 of each; dashes where nothing was completed."""
    return [seconds(value_s) if outcome.completed else "-" for spread in spreads for value_s in (spread.mean_s, spread.p99_s)]


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes))


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g} GB/s"


def _titled(first: str, *titles: str) -> Table:
    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column(first, no_wrap=True)
    for title in titles:
        found.add_column(title, justify="right")
    return found
