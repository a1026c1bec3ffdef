"""The drop-in against Mooncake's own package and master: the same generated calls have the same results, and leave the same memory.

A difference is a row of differences.py, whose group of calls has to show it: a row that is no longer needed fails, too.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.engines.live.environments import ROOT
from tests.engines.live.mooncake.differential.calls import Generator
from tests.engines.live.mooncake.differential.differences import DIFFERENCES, LEFT_OUT
from tests.engines.live.mooncake.differential.material import Call
from tests.engines.live.mooncake.differential.sides import Results, of_kvstore, of_mooncake

SEED: Final = int(os.environ.get("MOONCAKE_SEED", "1"))
"""Another one generates other sizes, addresses and shapes."""
NAMES: Final = "names"
Sides = tuple[list[tuple[str, list[Call]]], Results, Results]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """The calls, and what Mooncake and kvstore made of them."""
    groups = Generator(SEED).groups()
    folders = [tmp_path_factory.mktemp(name) for name in ("mooncake", "kvstore")]
    with ThreadPoolExecutor() as pool:
        mooncake = pool.submit(of_mooncake, groups, folders[0])
        kvstore = pool.submit(of_kvstore, groups, folders[1])
        return groups, mooncake.result(), kvstore.result()


def differing(sides: Sides, group: str) -> list[str]:
    groups, mooncake, kvstore = sides
    rows = zip(dict(groups)[group], mooncake[group], kvstore[group], strict=True)
    return [f"{call}\n  mooncake: {theirs}\n  kvstore:  {ours}" for call, theirs, ours in rows if theirs != ours]


def test_calls_have_the_results_of_mooncakes(sides: Sides) -> None:
    groups = [name for name, _ in sides[0] if name not in DIFFERENCES and name != NAMES]
    assert sum(len(calls) for name, calls in sides[0] if name in groups) > 1000
    found = {name: rows for name in groups if (rows := differing(sides, name))}
    assert not found, "\n".join(row for rows in found.values() for row in rows)


@pytest.mark.parametrize("group", DIFFERENCES)
def test_listed_difference_is_there(sides: Sides, group: str) -> None:
    assert differing(sides, group), f"{group} needs no row any more"


def test_names_are_there_or_left_out(sides: Sides) -> None:
    groups, mooncake, kvstore = sides
    for call, (theirs, _), (ours, _) in zip(dict(groups)[NAMES], mooncake[NAMES], kvstore[NAMES], strict=True):
        if call["m"] == "$names":
            assert set(theirs) - set(ours) == LEFT_OUT.get(".".join(call["a"]), set()), call
        else:
            assert theirs == ours, call


def test_documentation_has_each_difference() -> None:
    page = " ".join(Path(ROOT / "docs" / "engines.md").read_text().split())
    assert [reason for reason in DIFFERENCES.values() if reason not in page] == []
