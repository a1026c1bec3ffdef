"""Promises of docs/topology.md: its JSON is read by the code."""

import json
import re
from pathlib import Path

from kvstore.transfer.topology.json_form import as_json, override_from_file, parse_topology
from kvstore.transfer.topology.model import RailPreference

DOCUMENT = (Path(__file__).parents[2] / "docs" / "topology.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    """The indented blocks that are JSON."""
    found = re.findall(r"(?:^    .*\n)+", DOCUMENT, re.MULTILINE)
    return [block for block in found if block.strip().startswith("{")]


def test_the_whole_form_is_read_as_it_stands_there() -> None:
    text = next(block for block in blocks() if '"version"' in block)
    assert as_json(parse_topology(text.encode())) == json.loads(text)


def test_the_matrix_is_read_as_an_override(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(next(block for block in blocks() if '"version"' not in block))
    assert override_from_file(path).matrix == {
        "cpu:0": RailPreference(("mlx5_0",), ("mlx5_1",)),
        "cuda:0": RailPreference(("mlx5_0",), ("mlx5_1",)),
    }
