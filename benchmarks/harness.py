"""Parts that benchmarks share: a run in parts with its table and JSON, CPU time of processes, a Redis of their own.

Arguments of a benchmark in parts name those to run, without them it is all. Each row is printed as it is had, and the table at the end.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console

from kvstore.cli.tools.bench import BenchRow, table

START_DEADLINE_S: Final = 10.0


def run(parts: Mapping[str, Callable[[], Iterable[BenchRow]]], out: Path, *, may_lack: tuple[type[Exception], ...] = ()) -> int:
    """The exit status. `out` gets the rows; a part that raises one of `may_lack` is left out from there on."""

    def rows() -> Iterator[BenchRow]:
        for name in sys.argv[1:] or parts:
            try:
                yield from parts[name]()
            except may_lack as trouble:
                print(f"{name}: left out, {trouble}", file=sys.stderr)

    return report(rows(), out)


def write(rows: Iterable[BenchRow], path: Path) -> None:
    """Write the rows as JSON. The folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def report(rows: Iterable[BenchRow], out: Path) -> int:
    """Print each row as it is had, and the table at the end; write them to `out`. The exit status."""
    found: list[BenchRow] = []
    for row in rows:
        print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        found.append(row)
    Console().print(table(found))
    write(found, out)
    return 0


def cpu_ns(pid: int) -> int:
    """CPU time of all threads that the process has now, in ns. /proc/PID/stat counts ticks of 10 ms, the cost of a hundred small calls."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """A context manager: the socket's path and the server's process id."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = f"{folder}/redis.sock"
        arguments = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
        server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        try:
            _await(path)
            yield path, server.pid
        finally:
            server.terminate()
            server.wait()


def _await(path: str) -> None:
    """Return once the server answers. Raises redis.ConnectionError after START_DEADLINE_S."""
    import redis  # here: most benchmarks need none

    until_s = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            redis.Redis(unix_socket_path=path).ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
