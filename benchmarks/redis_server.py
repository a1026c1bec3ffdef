"""A Redis of a benchmark's own, to compare with: without persistence, over a Unix socket."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Final

import redis

START_DEADLINE_S: Final = 10.0


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
    until_s = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            redis.Redis(unix_socket_path=path).ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
