"""One replay against a cluster, from status to status, with a progress bar on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.client.tools.cluster import Cluster
from kvstore.client.tools.replay import Replay, ReplayCounts
from kvstore.client.tools.replay_report import ReplayReport, settled_status
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import Retry

DEATH_NOTICE_S: Final = 1.0
"""A dying process hangs up a little before it can be told dead."""


def run(
    settings: ClientSettings, requests: Iterable[TraceRequest], *, total: int, block_bytes: int, cluster: Cluster | None = None
) -> ReplayReport:
    """Replay with a progress bar on standard error. Of a cluster of one's own, a daemon that ended is the reason given."""
    control = Control.find(settings) if cluster is None else cluster.control()
    with control, Client(settings=settings) as client:
        before = control.status()
        engine = Replay(client, block_bytes=block_bytes)
        begin = time.perf_counter()
        try:
            with progress(total) as on_request:
                counts = engine.run(requests, on_request)
        except Retry:
            if cluster is not None:
                cluster.check(wait_s=DEATH_NOTICE_S)
            raise
        seconds = time.perf_counter() - begin
        after = settled_status(control)
        return ReplayReport(counts, client.stats().hits_by_tier, before, after, block_bytes, seconds)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[ReplayCounts], None]]:
    """A bar on standard error; gives what is to be called with the counts after each request."""
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prefix hit ratio {task.fields[ratio]:.4f}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=total, ratio=0.0)

        def on_request(counts: ReplayCounts) -> None:
            bar.update(task, completed=counts.requests, ratio=counts.prefix_hit_ratio)

        yield on_request
