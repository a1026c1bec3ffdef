"""The patches fit the sources as they are, and the hunt tells a mutant that tests catch from one that they do not."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.hunt import Tree
from tests.mutants.mutant import ROOT, Mutant, read_all

MUTANTS = read_all()


def test_there_are_as_many_as_were_promised() -> None:
    assert len(MUTANTS) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_fits_the_source_and_names_tests_that_are_there(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    patched = mutant.patched(source)
    assert ast.dump(ast.parse(patched)) != ast.dump(ast.parse(source))
    assert mutant.tests
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_a_patch_whose_text_is_not_there_any_more_is_named() -> None:
    with pytest.raises(ValueError, match=MUTANTS[0].name):
        MUTANTS[0].patched("")


def test_a_bug_is_caught_and_a_change_without_one_is_not(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "rpc").mkdir(parents=True)
    (project / "__init__.py").touch()
    (project / "rpc/__init__.py").touch()
    (project / "rpc/sums.py").write_text("def total(of: list[int]) -> int:\n    return sum(of)\n")
    (project / "tests").mkdir()
    (project / "tests/test_sums.py").write_text(
        "from kvstore.rpc.sums import total\n\n\ndef test_one() -> None:\n    assert total([]) == 0\n\n\n"
        "def test_two() -> None:\n    assert total([1, 2]) == 3\n"
    )
    bug = Mutant("forgets", "It forgets one.", "rpc/sums.py", "sum(of)", "sum(of[1:])", ("tests/test_sums.py",))
    tree = Tree(tmp_path / "copy", project)
    assert tree.failing(bug.tests, timeout_s=60) is None
    assert tree.caught_by(bug, timeout_s=60) == "tests/test_sums.py::test_two"
    assert tree.caught_by(replace(bug, new="sum(of )"), timeout_s=60) is None
    assert (project / "rpc/sums.py").read_text() == (tmp_path / "copy/rpc/sums.py").read_text()
    with pytest.raises(RuntimeError, match="ended with code"):
        tree.failing(["tests/test_nothing.py"], timeout_s=60)
