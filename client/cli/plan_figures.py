"""A plan's charts: what fits, what reuse needs, and what strategies make of more and fewer users. It reckons nothing itself."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.client.tools.plan_trace import TraceHits
from kvstore.client.tools.planning import Plan, sequence_curve
from kvstore.lab.plots import Series, Weight, line_chart, save, stacked_bars
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.pressure.model import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens, of the chart of sequences."""


def draw(plan: Plan, outcomes: Mapping[int, Sequence[Outcome]], hits: Sequence[TraceHits], folder: str | Path, suffix: str) -> list[Path]:
    """Writes memory, sequences, reuse, ttft, latency, goodput, failed and hits as files of this suffix and says where. Without times or
    hits those charts are left out.

    `outcomes`: by number of users, of every strategy. Raises ConfigError for a folder that cannot be made or written, or without
    matplotlib.
    """
    folder = Path(folder)
    figures = {"memory": _memory(plan), "sequences": _sequences(plan)}
    if not plan.no_times:
        figures["reuse"] = _reuse(plan)
        figures["ttft"] = _over_users(outcomes, _ttft, "Time to first token of completed requests", "mean TTFT (s)")
        figures["latency"] = _over_users(outcomes, _latency, "Time to last token of completed requests", "mean latency (s)")
        figures["goodput"] = _over_users(outcomes, _goodput, "Tokens of complete answers", "goodput (tokens/s)")
        figures["failed"] = _over_users(outcomes, _failed, "Requests rejected or evicted", "share of requests")
    if hits:
        figures["hits"] = _hits(hits)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} for plots: {error.strerror or error}") from None
    paths = [folder / f"{name}.{suffix}" for name in figures]
    for figure, path in zip(figures.values(), paths, strict=True):
        save(figure, path)
    return paths


def _memory(plan: Plan) -> "Figure":
    hbm = plan.hbm
    parts = {"weights": hbm.weight_bytes, "reserve": hbm.reserve_bytes, "KV cache": hbm.kv_bytes}
    return stacked_bars(
        [f"{plan.setup.gpu.name}, one of {hbm.gpus}"],
        {name: [size_bytes / 1e9] for name, size_bytes in parts.items()},
        title=f"The memory of a GPU: {plan.setup.model.name}",
        x_label="",
        y_label="bytes (GB)",
    )


def _sequences(plan: Plan) -> "Figure":
    lines, names = [], []
    for name, counts in sequence_curve(plan.setup, CONTEXTS).items():
        names.append(name)
        # A logarithmic axis has no place for none.
        points = [(tokens, count) for tokens, count in zip(CONTEXTS, counts, strict=True) if count]
        if points:
            lines.append(Series(" + ".join(names), [x for x, _ in points], [y for _, y in points]))
    wanted = Series("users", list(CONTEXTS), [plan.setup.load.users] * len(CONTEXTS), Weight.BOUND)
    return line_chart(
        [*lines, wanted],
        title=f"Sequences whose caches fit: {plan.setup.model.name}, {plan.hbm.gpus} x {plan.setup.gpu.name}",
        x_label="context (tokens)",
        y_label="sequences",
        log_x=True,
        log_y=True,
    )


def _reuse(plan: Plan) -> "Figure":
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


def _over_users(outcomes: Mapping[int, Sequence[Outcome]], figure: Callable[[Outcome], float], title: str, y_label: str) -> "Figure":
    """A line a strategy."""
    users = sorted(outcomes)
    names = [outcome.strategy for outcome in outcomes[users[0]]]
    lines = [Series(name, users, [figure(outcomes[count][index]) for count in users]) for index, name in enumerate(names)]
    return line_chart(lines, title=title, x_label="users", y_label=y_label)


def _ttft(outcome: Outcome) -> float:
    return outcome.ttft.mean_s


def _latency(outcome: Outcome) -> float:
    return outcome.latency.mean_s


def _goodput(outcome: Outcome) -> float:
    return outcome.goodput_tokens_per_s


def _failed(outcome: Outcome) -> float:
    return (outcome.rejected + outcome.evicted) / outcome.requests if outcome.requests else 0.0


def _hits(hits: Sequence[TraceHits]) -> "Figure":
    return stacked_bars(
        ["the trace"],
        {each.name: [each.added_ratio] for each in hits},
        title="Prefix hits by tier",
        x_label="",
        y_label="prefix hit ratio (share of blocks)",
    )
