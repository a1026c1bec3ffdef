"""How plots look: colours for light and dark ground, and SVG text that follows the reader's choice of the two. It draws nothing.

Everything is drawn in the colours for a light ground, each of which stands for one role. In SVG each is then replaced by a CSS variable
with a second value for a dark ground. PNG stays as drawn, on white.
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
"""Role to (on light, on dark ground). No two roles share a light colour: that is how they are told apart in the SVG. Series colours
keep 4.5:1 to either ground; neighbours differ in brightness or hue to colour-blind readers too, and markers tell the rest."""
SERIES_COLOURS: Final = sum(role.startswith("series") for role in COLOURS)
TIERS: Final = {"HBM": 5, "DRAM": 7, "NVMe": 4}
"""Whose series has the same colour and marker in every plot: those that a plot's other series come to last."""
MARKERS: Final = "osD^vPXph*<"
"""A number of markers that has no factor in common with the number of colours: 88 series before a pair comes again."""
FONT: Final = "DejaVu Sans"
"""matplotlib's own, by which it lays text out; wider than what system-ui stands for, so that nothing runs over in SVG."""
SETTINGS: Final[dict[str, Any]] = {
    "font.family": FONT,
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvstore",
    "hatch.linewidth": 0.7,
}


def colour(role: str) -> str:
    """On a light ground, as #rrggbb."""
    return COLOURS[role][0]


def series_index(name: str, index: int) -> int:
    """Of the series called that, the `index`-th of its plot: by which its colour and marker are chosen. `A + B` goes by B, what it adds."""
    return TIERS.get(name.rpartition(" + ")[2], index)


def series_colour(index: int) -> str:
    return colour(f"series-{index % SERIES_COLOURS}")


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def adapt(svg: str) -> str:
    """An SVG document drawn in light colours, as one that follows the reader's colour scheme."""
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    svg = svg.replace(f"'{FONT}'", "system-ui, sans-serif")
    head, opening, rest = svg.partition("<svg")
    attributes, end, body = rest.partition(">")
    return f"{head}{opening}{attributes}{end}\n<style>{_style()}</style>{body}"


def _style() -> str:
    light, dark = ("; ".join(f"--{role}: {pair[ground]}" for role, pair in COLOURS.items()) for ground in (0, 1))
    return f"\nsvg {{ {light}; background: var(--ground); }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark}; }} }}\n"
