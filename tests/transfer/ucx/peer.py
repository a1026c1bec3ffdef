"""A process at the other end of a UCX connection: `python -m`-less, for it is started by path. Its first argument selects what it does.

echo: echoes each part, whose size is announced by eight bytes. quiet: receives nothing. flood: sends parts of 256 MiB.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.protocol.errors import Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener
from kvstore.transfer.ucx.connection import UcxConnection

PATIENCE_S = 30.0
FLOOD_BYTES = 256 << 20


@contextmanager
def process(task: str, listener: Listener) -> Iterator[tuple["subprocess.Popen[bytes]", Connection]]:
    """The process and this side's end of its connection; killed at the end."""
    child = subprocess.Popen([sys.executable, str(Path(__file__)), task, listener.metadata().hex()], stdin=subprocess.PIPE)
    try:
        connection = listener.accept(PATIENCE_S)
        assert connection is not None
        yield child, connection
        connection.close()
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def main(task: str, metadata: str) -> None:
    connection = UcxConnection.connect(bytes.fromhex(metadata), Rail(), Deadline(PATIENCE_S))
    try:
        if task == "quiet":
            sys.stdin.read()
        while task == "flood":
            connection.send([b"\xee" * FLOOD_BYTES], Deadline(PATIENCE_S))
        while task == "echo":
            size = bytearray(8)
            connection.recv_into([memoryview(size)], Deadline(PATIENCE_S))
            part = bytearray(int.from_bytes(size))
            connection.recv_into([memoryview(part)], Deadline(PATIENCE_S))
            connection.send([memoryview(part)], Deadline(PATIENCE_S))
    except Unreachable:
        pass  # the test is over


if __name__ == "__main__":
    main(*sys.argv[1:])
