"""Promises of plot_theme.py: roles stay apart, are readable on both grounds, and the SVG follows the reader's choice."""

import re

import pytest

from kvstore.lab.plot_theme import COLOURS, adapt, colour

SERIES = [role for role in COLOURS if role.startswith("series")]


def luminance(code: str) -> float:
    """Relative, as WCAG 2 defines it."""
    parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", [0, 1])
@pytest.mark.parametrize("role", [*SERIES, "text", "soft"])
def test_what_has_to_be_read_stands_out_on_either_ground(role: str, ground: int) -> None:
    assert contrast(COLOURS[role][ground], COLOURS["ground"][ground]) >= 4.5


def test_theme_colours_are_distinct() -> None:
    assert len({light for light, _ in COLOURS.values()}) == len(COLOURS)
    assert len({COLOURS[role][1] for role in SERIES}) == len(SERIES)
    assert all(re.fullmatch("#[0-9a-f]{6}", code) for pair in COLOURS.values() for code in pair)


def test_theme_svg_colours_become_css_variables() -> None:
    drawn = f"""<?xml version="1.0"?>\n<svg width="1">\n<text style="fill: {colour("text")}; font-family: 'DejaVu Sans'">#1</text></svg>"""
    found = adapt(drawn)
    assert found.startswith('<?xml version="1.0"?>\n<svg width="1">\n<style>')
    assert '<text style="fill: var(--text); font-family: system-ui, sans-serif">#1</text>' in found
    light, dark = found.split("@media (prefers-color-scheme: dark)")
    for role, (on_light, on_dark) in COLOURS.items():
        assert f"--{role}: {on_light};" in light
        assert f"--{role}: {on_dark};" in dark
