"""`make fuzz`: every target under a coverage-guided fuzzer for a while, from the inputs that are kept.

Exit code 1 and the input in base64 if one raises anything but a typed error, takes more than a second or much memory.
--keep adds what reached new code to what is kept.
"""

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tests.fuzz import corpus
from tests.fuzz.targets import TARGETS

TIMEOUT_S = 60
"""For one input: more than any takes, also where the machine is busy."""
MEMORY_MB = 2048


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(sorted(TARGETS)))
@click.option("--seconds", default=20, show_default=True, help="Time of each target.")
@click.option("--keep", is_flag=True, help="Write what reached new code to tests/fuzz/corpus.")
def main(names: tuple[str, ...], seconds: int, keep: bool) -> None:
    is_found = False
    for name in names or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            is_found |= _fuzz(name, Path(folder), seconds=seconds, keep=keep)
    if is_found:
        raise SystemExit(1)


def _fuzz(name: str, folder: Path, *, seconds: int, keep: bool) -> bool:
    """Fuzz one target and print its findings. Return True if it has any."""
    inputs = folder / "inputs"
    corpus.unpack(name, inputs)
    limits = (f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={corpus.MAX_INPUT_BYTES}", "-verbosity=0")
    run = _child(name, *limits, f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={folder}/found-", str(inputs))
    runs = next((line.split()[-1] for line in run.splitlines() if "number_of_executed_units" in line), "?")
    found = sorted(folder.glob("found-*"))
    click.echo(f"{name}: {runs} inputs, {len(found)} findings")
    for path in found:
        click.echo(f"  {path.name.split('-')[1]}: {base64.b64encode(path.read_bytes()).decode()}")
    if found:
        click.echo("\n".join(run.splitlines()[:40]))
    elif keep:
        corpus.write(name, [path.read_bytes() for path in inputs.iterdir()])  # what was there, and what reached new code
    return bool(found)


def _child(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "tests.fuzz.child", name, *arguments]
    return subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


if __name__ == "__main__":
    main()
