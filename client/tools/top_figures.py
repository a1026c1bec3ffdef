"""Figures of `kvstore top`: counts, latencies and lines of bars as text. Pure."""

from collections.abc import Sequence
from typing import Final

SPARKS: Final = " ▁▂▃▄▅▆▇█"
LEVELS: Final = 8
"""Of one character."""


def count_text(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def latency_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def spark_lines(values: Sequence[float], lines: int) -> list[str]:
    """Bars of `lines` characters at most, the highest value filling them, a line of characters each from the top down. A bar has a level
    at least, so that a value of 0 is told from one that is not known."""
    most = max(values, default=0) or 1
    heights = [max(1, min(LEVELS * lines, int(LEVELS * lines * value / most))) for value in values]
    floors = [LEVELS * (lines - 1 - line) for line in range(lines)]
    return ["".join(SPARKS[min(LEVELS, max(0, height - floor))] for height in heights) for floor in floors]
