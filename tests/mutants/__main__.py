"""`make mutants`: put each seeded bug into a copy of the tree and print the test that catches it. Exit code 1 if one survives."""

import tempfile
import time
from pathlib import Path

import click

from tests.mutants.hunt import Tree
from tests.mutants.mutant import read_all


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--timeout-s", default=600.0, show_default=True, help="A mutant whose tests run for longer counts as caught: they hang.")
def main(names: tuple[str, ...], timeout_s: float) -> None:
    mutants = [mutant for mutant in read_all() if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        raise click.UsageError(f"there is no mutant {', '.join(sorted(unknown))}")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        if (failed := tree.failing(tests, timeout_s=timeout_s * len(mutants))) is not None:
            raise click.ClickException(f"{failed} fails without any mutant")
        for mutant in mutants:
            begin_s = time.monotonic()
            caught_by = tree.caught_by(mutant, timeout_s=timeout_s)
            click.echo(f"{mutant.name}: {caught_by or 'SURVIVED'} ({time.monotonic() - begin_s:.0f} s)")
            if caught_by is None:
                survivors.append(mutant.name)
    click.echo(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants are caught")
    if survivors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
