"""`make bench-fingerprint`: how long an engine's start waits for the fingerprint of a checkpoint of 100 GB.

The checkpoint is sparse: 10,000 tensors of 10 MB in 20 safetensors files, with a block of data in each tensor. `cold`: the page cache is
dropped before (root), nothing is remembered. `warm`: the same files again. `remembered`: by their stat. `stamp`: what a running engine
does to notice a change. Rows go to benchmarks/out/fingerprint.json.
"""

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import run
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.engines.weights.fingerprint import fingerprint, stamp

OUT: Final = Path(__file__).parent / "out" / "fingerprint.json"
FILES: Final = 20
TENSORS: Final = 10_000
TENSOR_BYTES: Final = 10_000_000
WRITTEN_BYTES: Final = 4096
"""Of each tensor, in its middle; the rest is a hole of the file."""
SERIES: Final = 5


def main() -> int:
    return run({"fingerprint": rows}, OUT)


def rows() -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVSTORE_BENCH_DIR") or Path.cwd()) as folder:
        checkpoint, cache = Path(folder) / "checkpoint", Path(folder) / "cache.json"
        _write(checkpoint)
        cold_s = []
        for _ in range(SERIES):
            if not _drop_page_cache():
                break
            cold_s.append(_seconds(lambda: fingerprint(checkpoint, cache=None)))
        if cold_s:
            yield at_most("fingerprint of 100 GB, 10,000 tensors, 20 files, cold cache", statistics.median(cold_s), "s", 5)
            yield BenchRow("the same, slowest of 5", max(cold_s), "s")
        yield BenchRow("the same, warm cache", _median(lambda: fingerprint(checkpoint, cache=None)), "s")
        fingerprint(checkpoint, cache=cache, now_ns=lambda: 1 << 62)
        yield BenchRow("the same, remembered", 1e3 * _median(lambda: fingerprint(checkpoint, cache=cache)), "ms")
        yield BenchRow("stamp of 20 files", 1e6 * _median(lambda: stamp(checkpoint)), "us")


def _write(folder: Path) -> None:
    folder.mkdir()
    for part in range(FILES):
        names = [f"model.layers.{index}.weight" for index in range(part, TENSORS, FILES)]
        places = {name: [at * TENSOR_BYTES, (at + 1) * TENSOR_BYTES] for at, name in enumerate(names)}
        entries = {name: {"dtype": "BF16", "shape": [TENSOR_BYTES // 2], "data_offsets": place} for name, place in places.items()}
        header = json.dumps(entries).encode()
        with open(folder / f"model-{part:05}-of-{FILES:05}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            start = file.tell()
            for _, end in places.values():
                file.seek(start + end - TENSOR_BYTES // 2 - WRITTEN_BYTES)
                file.write(os.urandom(2 * WRITTEN_BYTES))
            file.truncate(start + len(names) * TENSOR_BYTES)


def _drop_page_cache() -> bool:
    """Return whether the machine allows it."""
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        print(f"the page cache cannot be dropped ({error}): no cold rows", file=sys.stderr)
        return False
    return True


def _median(measured: Callable[[], object]) -> float:
    return statistics.median(_seconds(measured) for _ in range(SERIES))


def _seconds(measured: Callable[[], object]) -> float:
    begun = time.perf_counter()
    measured()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
