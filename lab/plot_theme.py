"""Theme of plots: colours for light and dark background, markers, and the adaptation of SVG to the reader's colour scheme.

Plots are drawn in the colours for a light background, one per role. In SVG each colour is replaced by a CSS variable that has a second
value for a dark background. PNG stays as drawn, on white.
"""

from typing import Any, Final

COLOURS: Final = {
    "ground": ("#ffffff", "#14181e"),
    "text": ("#1b2430", "#e8ecf1"),
    "soft": ("#566170", "#a3aebb"),
    "edge": ("#8d97a5", "#5d6977"),
    "grid": ("#e3e6eb", "#2a323c"),
    "series-0": ("#0068a8", "#5cb4f0"),
    "series-1": ("#c84a00", "#ff9a5c"),
    "series-2": ("#00795a", "#35cf9f"),
    "series-3": ("#b03a88", "#f09acb"),
    "series-4": ("#8a6a00", "#e3c14c"),
    "series-5": ("#5145c0", "#b0a4ff"),
    "series-6": ("#a31f34", "#ff8391"),
    "series-7": ("#00788c", "#62d6e6"),
}
"""Role -> (colour on light, on dark background). Light colours are unique, because `adapt` finds roles by them. Series colours have a
contrast of 4.5:1, and neighbours are distinct for colour-blind readers."""
SERIES_COLOURS: Final = sum(role.startswith("series") for role in COLOURS)
TIERS: Final = {"HBM": 5, "DRAM": 7, "NVMe": 4}
"""Series with the same colour and marker in every plot; the indices are those that other series use last."""
MARKERS: Final = "osD^vPXph*<"
"""Their number is coprime to that of the colours, so 88 series have distinct pairs."""
FONT: Final = "DejaVu Sans"
"""matplotlib's own font, for layout. It is wider than system-ui fonts, so that text in SVG does not overflow."""
SETTINGS: Final[dict[str, Any]] = {
    "font.family": FONT,
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvstore",
    "hatch.linewidth": 0.7,
}


def colour(role: str) -> str:
    """Return the colour on a light background, as #rrggbb."""
    return COLOURS[role][0]


def series_index(name: str, index: int) -> int:
    """Return the index for colour and marker of the series `name`, the `index`-th of its plot. `A + B` is treated as B."""
    return TIERS.get(name.rpartition(" + ")[2], index)


def series_colour(index: int) -> str:
    return colour(f"series-{index % SERIES_COLOURS}")


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def adapt(svg: str) -> str:
    """Make an SVG document drawn in light colours follow the reader's colour scheme."""
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    svg = svg.replace(f"'{FONT}'", "system-ui, sans-serif")
    head, opening, rest = svg.partition("<svg")
    attributes, end, body = rest.partition(">")
    return f"{head}{opening}{attributes}{end}\n<style>{_style()}</style>{body}"


def _style() -> str:
    light, dark = ("; ".join(f"--{role}: {pair[ground]}" for role, pair in COLOURS.items()) for ground in (0, 1))
    return f"\nsvg {{ {light}; background: var(--ground); }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark}; }} }}\n"
