"""The parts of `make gpu`, and the process of one: `python -m benchmarks.gpu.parts NAME FILE` appends its rows to FILE as
they are had.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.cli.tools.bench import BenchRow


class Part(NamedTuple):
    """One part, a function without arguments that yields rows."""

    title: str
    function: str
    """MODULE:NAME in this folder; imported by the part's own process."""
    seconds: float
    """Deadline."""


PARTS: Final = {
    "machine": Part("card, driver, torch", "machine:rows", 60),
    "tests": Part("tests marked gpu, and the HBM tier's suites", "device_tests:tier_rows", 150),
    "codec-tests": Part("codecs against the CPU, to the bit", "device_tests:codec_rows", 80),
    "copies": Part("copies between host and device", "copies:rows", 40),
    "page-locks": Part("page-locking of the store's memory", "page_locks:rows", 40),
    "layers": Part("gather and scatter of paged layers", "layers:rows", 40),
    "store": Part("puts and gets of a device pool", "store:rows", 60),
    "hbm": Part("the HBM tier", "hbm:rows", 50),
    "codecs": Part("codecs against the memory's bandwidth", "codecs:rows", 70),
    "engine": Part("matrix products beside puts and gets", "engine:rows", 40),
    "nixl": Part("NIXL with device memory", "nixl_vram:rows", 30),
}


def main() -> None:
    name, path = sys.argv[1:]
    module, _, function = PARTS[name].function.partition(":")
    with Path(path).open("a") as out:
        rows: Iterator[BenchRow] = getattr(import_module(f"benchmarks.gpu.{module}"), function)()
        for row in rows:
            out.write(json.dumps(asdict(row)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
