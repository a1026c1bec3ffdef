"""`kvstore lab`: replays recorded prompts through eviction policies, without a cluster."""

import functools
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.cli.options import console, echo_json, json_option
from kvstore.cli.tools.tables import progress
from kvstore.kvcache.traces.kv_events import read_prompts
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import read_requests
from kvstore.lab.accesses import Accesses, flatten
from kvstore.lab.hints import check_share
from kvstore.lab.home_pool import HomePoolOptions
from kvstore.lab.jobs import (
    HintJob,
    HintRow,
    HomePoolJob,
    HomePoolRow,
    Job,
    PolicyJob,
    PolicyRow,
    PoolJob,
    PoolRow,
    Row,
    TierJob,
    TierRow,
)
from kvstore.lab.plots import save_all
from kvstore.lab.pools import Routing
from kvstore.lab.replay import check_capacity
from kvstore.lab.report import as_json as rows_as_json
from kvstore.lab.report import (
    bounds,
    hint_table,
    hit_ratio,
    home_pool_table,
    policy_table,
    pool_gain,
    pool_table,
    summarise,
    tier_hits,
    tier_table,
    trace_figures,
)
from kvstore.lab.runs import run_jobs
from kvstore.protocol.errors import InvalidArgument, TraceError
from kvstore.tiers.policies.by_name import DEFAULT, POLICY_NAMES, make_family, make_policy
from kvstore.tiers.policies.prefix.policy import PrefixPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL: Final = "all"
CAPACITIES: Final = "1000,3000,10000,30000,50000"
MAX_CAPACITIES: Final = 64
HINTED: Final = (DEFAULT, PrefixPolicy.name)
"""Policies that heed hints."""


@click.command(short_help="Compare eviction policies on a trace, and draw plots.")
@click.argument("trace", metavar="TRACE")
@click.option("--policies", default=ALL, show_default=True, metavar="NAMES", help="Policies, separated by commas; or all.")
@click.option("--capacities", default=CAPACITIES, show_default=True, metavar="BLOCKS", help="Capacities in blocks, separated by commas.")
@click.option("--limit", type=click.IntRange(min=1), help="Replay only this many requests, from the first.")
@click.option("--tiers", metavar="DRAM:NVME", help="Also replay through a node with this many blocks of DRAM and of NVMe.")
@click.option(
    "--pools", metavar="N:BLOCKS", help="Also compare one pool with N local caches of BLOCKS blocks each; with --writers DRAM+NVME blocks."
)
@click.option(
    "--writers", metavar="SHARES", help="With --pools, also N nodes with home copies: shares of the prompts at each, as 80,10,5,5."
)
@click.option("--hints", type=float, metavar="SHARE", help="Also replay with retention hints from this share of the sessions, 0 to 1.")
@click.option("--plots", metavar="DIR", help="Write plots to DIR. Needs the extra plots.")
@click.option("--plot-format", type=click.Choice(["svg", "png"]), default="svg", show_default=True, help="Format of the plots.")
@click.option("--processes", type=click.IntRange(min=1, max=256), help="Worker processes.  [default: one per processor]")
@json_option
def lab(trace: str, policies: str, capacities: str, plots: str | None, plot_format: str, as_json: bool, **options: Any) -> None:
    """Replay TRACE through eviction policies as a node would, at several capacities, and compare their prefix hit ratios.

    TRACE is a file in the public Mooncake format, a recording of a live cluster (kvstore record), or generated:SEED:COUNT for COUNT
    requests of generated conversations. The prefix hit ratio is the number of cached blocks before each request's first miss, over all
    blocks. --json prints a list with a row for each policy and capacity; with --tiers, --pools or --hints an object of such lists.

    --hints gives hints after each prompt: the time until the next read of each block, or priority 0 where none comes. It replays true
    hints, half of them random, and all random. Policies that ignore hints are left out.

    With --writers the N nodes of --pools are one pool, as in a live cluster: nearly full nodes' blocks are copied to their home node
    (home copies). It is compared with one node of N x BLOCKS blocks, with prompts by share and routed to the node that holds their
    beginning, and with policies that exchange what they learn or do not. N:DRAM+NVME gives each node two tiers.
    """
    names, sizes = _policies(policies), _capacities(capacities)
    jobs = _jobs(names, sizes, options)
    requests = _requests(trace, options["limit"])
    accesses = flatten(requests)
    # Before the replay, so that a folder that cannot be written fails at once.
    if plots is not None:
        save_all(_named(trace_figures(accesses), plot_format), plots)
    with progress("replaying", len(jobs)) as on_done:
        rows = run_jobs(jobs, requests, processes=options["processes"] or 0, on_done=on_done)
    report = _Report(requests, accesses, sizes, rows)
    if plots is not None:
        save_all(_named(report.figures(), plot_format), plots)
    report.show(plots, as_json=as_json)


def _policies(text: str) -> list[str]:
    names = list(POLICY_NAMES) if text == ALL else _unique(text)
    for name in names:
        make_policy(name)  # raises for an unknown name
    if not names:
        raise InvalidArgument("--policies is empty: name policies separated by commas, or all")
    return names


def _capacities(text: str) -> list[int]:
    sizes = [_blocks(part, "--capacities") for part in _unique(text)]
    if not 1 <= len(sizes) <= MAX_CAPACITIES:
        raise InvalidArgument(f"--capacities names {len(sizes)} capacities: name 1 to {MAX_CAPACITIES}")
    return sorted(set(sizes))


def _unique(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _blocks(text: str, option: str) -> int:
    """Parse a capacity in blocks. Raises InvalidArgument."""
    if not text.isdecimal():
        raise InvalidArgument(f"{option}: {text!r} is not a number of blocks")
    blocks = int(text)
    check_capacity(blocks)
    return blocks


def _pair(text: str, form: str) -> tuple[int, int]:
    """Parse `FIRST:SECOND`, two whole numbers of which the second is not 0. Raises InvalidArgument."""
    first, _, second = text.partition(":")
    if not first.isdecimal() or not second.isdecimal() or not int(second):
        raise InvalidArgument(f"{text!r} is not of the form {form}, two whole numbers")
    return int(first), int(second)


def _jobs(names: Sequence[str], sizes: Sequence[int], options: Mapping[str, Any]) -> list[Job]:
    tiers, pools, writers, hints = (options[name] for name in ("tiers", "pools", "writers", "hints"))
    jobs: list[Job] = [PolicyJob(name, size) for name in names for size in sizes]
    if tiers is not None:
        dram, nvme = _pair(tiers, "DRAM:NVME")
        jobs += [TierJob(name, dram, nvme) for name in names]
    if pools is not None:
        one_tier, plus, below = pools.partition("+")
        instances, blocks = _pair(one_tier, "N:BLOCKS")
        nvme_blocks = _blocks(below, "--pools") if plus else 0
        if plus and writers is None:
            raise InvalidArgument("--pools N:DRAM+NVME needs --writers")
        if not plus:
            jobs += [PoolJob(name, routing, instances, blocks) for name in names for routing in Routing]
        if writers is not None:
            jobs += _home_pools(names, (blocks, nvme_blocks), _shares(writers, instances))
    elif writers is not None:
        raise InvalidArgument("--writers needs --pools N:BLOCKS")
    if hints is not None:
        check_share("share", hints)
        jobs += [HintJob(name, size, hints) for name in _heeding(names) for size in sizes]
    return jobs


def _shares(text: str, nodes: int) -> tuple[float, ...]:
    """Parse shares of the prompts at each node; nodes without one get none. Raises InvalidArgument."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"--writers: {text!r} is not a list of numbers, as 80,10,5,5") from None
    if len(shares) > nodes:
        raise InvalidArgument(f"--writers names {len(shares)} shares for {nodes} nodes")
    return (*shares, *[0.0] * (nodes - len(shares)))


def _home_pools(names: Sequence[str], node_blocks: tuple[int, int], shares: Sequence[float]) -> list[Job]:
    jobs: list[Job] = []
    for name in names:
        has_statistics = make_family(name).reuse_statistics() is not None
        for is_routed, is_shared in product((False, True), (False, True) if has_statistics and len(shares) > 1 else (False,)):
            jobs.append(HomePoolJob(name, *node_blocks, HomePoolOptions(shares, is_routed=is_routed, is_shared=is_shared)))
    return jobs


def _heeding(names: Sequence[str]) -> list[str]:
    """Return the policies that heed hints, each once. Raises InvalidArgument if there is none."""
    found = {PrefixPolicy.name if name == DEFAULT else name: name for name in names if name in HINTED}
    if not found:
        raise InvalidArgument(f"--hints: none of the policies heeds hints: add {PrefixPolicy.name}")
    return list(found.values())


def _requests(trace: str, limit: int | None) -> list[TraceRequest]:
    """Raises TraceError for a trace that cannot be read or has no blocks, InvalidArgument for a malformed `generated:`."""
    requests = list(read_requests(trace, limit=limit, read_file=read_prompts))
    if not any(request.hash_ids for request in requests):
        raise TraceError(f"the trace {trace} has no blocks: there is nothing to replay")
    return requests


def _named(figures: Mapping[str, "Figure"], suffix: str) -> dict[str, "Figure"]:
    return {f"{name}.{suffix}": figure for name, figure in figures.items()}


class _Report:
    """Results of a run by kind of row, printed as tables, JSON or plots."""

    def __init__(self, requests: Sequence[TraceRequest], accesses: Accesses, sizes: Sequence[int], rows: Sequence[Row]) -> None:
        self._summary = summarise(len(requests), accesses)
        self._limits = functools.partial(bounds, accesses, sizes)
        self._policies = [row for row in rows if isinstance(row, PolicyRow)]
        self._tiers = [row for row in rows if isinstance(row, TierRow)]
        self._pools = [row for row in rows if isinstance(row, PoolRow)]
        self._home_pools = [row for row in rows if isinstance(row, HomePoolRow)]
        self._hints = [row for row in rows if isinstance(row, HintRow)]

    def show(self, plots: str | None, *, as_json: bool) -> None:
        if as_json:
            echo_json(self._json())
            return
        out = console()
        out.print(str(self._summary), soft_wrap=True)
        out.print(policy_table(self._policies, self._limits()))
        if self._tiers:
            out.print(tier_table(self._tiers))
        if self._pools:
            out.print(pool_table(self._pools))
        if self._home_pools:
            out.print(home_pool_table(self._home_pools))
        if self._hints:
            out.print(hint_table(self._hints))
        if plots is not None:
            out.print(f"plots are in {plots}", soft_wrap=True)

    def figures(self) -> dict[str, "Figure"]:
        figures = {"hit_ratio": hit_ratio(self._policies, self._limits())}
        if self._tiers:
            figures["tiers"] = tier_hits(self._tiers)
        for policy in dict.fromkeys(row.policy for row in self._pools):
            figures[f"pools_{policy}"] = pool_gain(self._pools, policy)
        return figures

    def _json(self) -> Any:
        policies = rows_as_json(self._policies)
        kinds: dict[str, Sequence[Row]] = {"tiers": self._tiers, "pools": self._pools, "home_pools": self._home_pools, "hints": self._hints}
        others = {name: rows_as_json(rows) for name, rows in kinds.items()}
        found = {name: rows for name, rows in others.items() if rows}
        return {"policies": policies, **found} if found else policies
