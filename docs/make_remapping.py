"""Prints docs/remapping.svg, drawn from a plan as the code makes it: `python docs/make_remapping.py > docs/remapping.svg`.

One block goes from an executor of TP 2 x PP 2 to one of TP 4: each bar is a rank's block in memory, each band a run of the plan.
"""

import sys
from collections.abc import Iterator
from html import escape
from typing import Final

from kvstore.kvcache.layouts.copies import Copies
from kvstore.kvcache.layouts.formatter import remap
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.lab.plot_theme import FONT, adapt, colour, series_colour

SPEC: Final = CacheSpec(layers=4, kv_heads=4, head_dim=128, block_tokens=16)
SOURCE: Final = CacheLayout(spec=SPEC, parallel=Parallel(tp=2, pp=2), pool_blocks=1)
DESTINATION: Final = CacheLayout(spec=SPEC, parallel=Parallel(tp=4), pool_blocks=1)

WIDTH: Final = 860
TOP: Final = 76
CELL: Final = 17
"""Height of a record: one layer's keys or values of one head. All measures are in pixels."""
BAR: Final = 96
GAP: Final = 34
"""Between the bars of two ranks, with the upper one's label."""
LEFT: Final = 150
RIGHT: Final = WIDTH - LEFT - BAR


def text() -> str:
    """The whole file."""
    height = TOP + _bar_height(SOURCE) * SOURCE.parallel.ranks
    run_bytes = remap(SOURCE, DESTINATION).run_bytes(0, 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="\'{FONT}\'" font-size="12" role="img">',
        f"<title>{_count(plans())} runs take one block from TP 2 x PP 2 to TP 4</title>",
        _label(WIDTH / 2, 22, f"One block of {SPEC.block_tokens} tokens, {SPEC.layers} layers, {SPEC.kv_heads} KV heads", size=15),
        _label(WIDTH / 2, 42, f"each band is one run of {run_bytes:,} bytes: a head's keys or values of a layer", role="soft"),
        _label(LEFT + BAR / 2, TOP - 12, "TP 2 x PP 2", size=14),
        _label(RIGHT + BAR / 2, TOP - 12, "TP 4", size=14),
        *(band for copies in plans() for band in _bands(*copies)),
        *_bars(SOURCE, LEFT, LEFT - 10, "end"),
        *_bars(DESTINATION, RIGHT, RIGHT + BAR + 10, "start"),
        "</svg>\n",
    ]
    return adapt("\n".join(parts))


def plans() -> list[tuple[int, int, Copies]]:
    """Of each pair of ranks: source, destination, and the copies of block 0."""
    plan = remap(SOURCE, DESTINATION)
    return [(pair.source_rank, pair.destination_rank, plan.copies(*pair[:2], [0], [0])) for pair in plan.pairs]


def _count(found: list[tuple[int, int, Copies]]) -> int:
    return sum(len(copies.length) for _, _, copies in found)


def _bar_height(layout: CacheLayout) -> float:
    return layout.region_bytes(0, 0) / SPEC.record_bytes(True) * CELL + GAP


def _y(layout: CacheLayout, rank: int, offset_bytes: int) -> float:
    return TOP + rank * _bar_height(layout) + offset_bytes / SPEC.record_bytes(True) * CELL


def _bands(source_rank: int, destination_rank: int, copies: Copies) -> Iterator[str]:
    ours, theirs = LEFT + BAR, RIGHT
    bend = (theirs - ours) / 2
    heads = _heads_by_offset(SOURCE, source_rank)
    for source, destination, length in zip(
        copies.source_offset.tolist(), copies.destination_offset.tolist(), copies.length.tolist(), strict=True
    ):
        start, end = _y(SOURCE, source_rank, source), _y(DESTINATION, destination_rank, destination)
        thick = length / SPEC.record_bytes(True) * CELL
        yield (
            f'<path class="run" d="M{ours},{start:g} C{ours + bend:g},{start:g} {theirs - bend:g},{end:g} {theirs},{end:g} v{thick:g} '
            f'C{theirs - bend:g},{end + thick:g} {ours + bend:g},{start + thick:g} {ours},{start + thick:g} z" '
            f'fill="{series_colour(heads[source])}" fill-opacity="0.3"/>'
        )


def _heads_by_offset(layout: CacheLayout, rank: int) -> dict[int, int]:
    return {offset: head for _, _, head, offset in _records(layout, rank)}


def _records(layout: CacheLayout, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """Layer, K or V, head and offset of all that the rank's block holds."""
    for layer in layout.rank_layers(rank):
        for kv in range(SPEC.kv_factor):
            for head in layout.rank_heads(rank):
                yield layer, kv, head, layout.locate(rank, layer, kv, head, 0)[1]


def _bars(layout: CacheLayout, x: float, label_x: float, anchor: str) -> Iterator[str]:
    for rank in range(layout.parallel.ranks):
        layers, heads = layout.rank_layers(rank), layout.rank_heads(rank)
        y = _y(layout, rank, 0)
        lines = (f"rank {rank}", f"layers {layers.start} to {layers.stop - 1}", f"heads {', '.join(map(str, heads))}")
        for at, line in enumerate(lines):
            yield _label(label_x, y + 14 + 17 * at, line, anchor=anchor, role="soft" if at else "text")
        for layer, kv, head, offset in _records(layout, rank):
            top = _y(layout, rank, offset)
            yield (
                f'<rect x="{x}" y="{top:g}" width="{BAR}" height="{CELL}" fill="{colour("ground")}" stroke="{colour("edge")}"/>'
                f'<rect x="{x}" y="{top:g}" width="6" height="{CELL}" fill="{series_colour(head)}"/>'
            )
            yield _label(x + BAR / 2 + 3, top + 12.5, f"layer {layer} {'KV'[kv]} head {head}", size=10)


def _label(x: float, y: float, line: str, *, size: int = 12, anchor: str = "middle", role: str = "text") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour(role)}">{escape(line)}</text>'


if __name__ == "__main__":
    sys.stdout.write(text())
