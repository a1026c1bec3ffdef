"""Common style of the commands' tables, numbers and progress bars."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvstore.protocol.settings import format_size

BAR_WIDTH: Final = 16
MAX_NAMES: Final = 10
"""Most names of nodes or tenants in a line."""
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def new_table(*columns: str, right: Collection[str] = (), no_wrap: Collection[str] = (), **options: Any) -> Table:
    """Create a table without lines. `right`: right-aligned columns; `no_wrap`: columns without wrapping; `options`: of rich's Table."""
    found = Table(box=None, header_style="bold", pad_edge=False, **options)
    for name in columns:
        found.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in no_wrap)
    return found


def figures_table(first: str, *titles: str) -> Table:
    """Create a table with names in the first column and right-aligned numbers in the others."""
    return new_table(first, *titles, right=titles, no_wrap=(first,))


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar if standard error is a terminal; yields a function to call for each of `total` steps."""
    stderr = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as shown:
        task = shown.add_task(what, total=total)
        yield lambda: shown.advance(task)


def bar(share: float, width: int = BAR_WIDTH) -> Text:
    """Return a bar of `width` columns, filled by `share` to an eighth of a column; red from 95 %, where eviction begins."""
    share = min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    style = "red" if share >= 0.95 else "yellow" if share >= 0.75 else "green"
    return Text.assemble((filled, style), ("·" * (width - len(filled)), "dim"))


def percent(part: float, whole: float) -> str:
    """Format `part` of `whole` as a percentage; a dash if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def duration(seconds: float) -> str:
    """Format a duration: `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def seconds(value_s: float) -> str:
    """Format a short time: `850 us`, `12.3 ms`, `1.27 s`, `105 s`."""
    if value_s < 0.001:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    return f"{value_s:.2f} s" if value_s < 100 else f"{value_s:.0f} s"


def rate(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s"


def names_shown(names: Sequence[str]) -> str:
    """Join the first MAX_NAMES names, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
