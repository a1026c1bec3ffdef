"""The patches fit the sources as they are, and the hunt tells a mutant that tests catch from one that they do not."""

import ast

import pytest

from tests.mutants.mutant import ROOT, Mutant, read_all

MUTANTS = read_all()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_fits_the_source_and_names_tests_that_are_there(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    patched = mutant.patched(source)
    assert ast.dump(ast.parse(patched)) != ast.dump(ast.parse(source))
    assert mutant.tests
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)
