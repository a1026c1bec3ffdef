"""A process that is many peers: one target behind many listeners. Reports its number of connections on request."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, Region, RemoteRegion
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpListener

REGION_BYTES = 4096
ROOT = Path(__file__).resolve().parents[3]


class ManyTargets:
    """`metadata` has one listener's an entry; `region` is one that all of them show, full of ones."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        told = self._read()
        self.metadata = [bytes.fromhex(text) for text in told["metadata"]]
        self.region = RemoteRegion(told["region_id"], REGION_BYTES, told["key"], {"tcp": b""})

    @property
    def connections(self) -> int:
        """Open now, as this peer sees it."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def many_targets(count: int) -> Iterator[ManyTargets]:
    """The process is killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", __name__, str(count)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield ManyTargets(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def main(count: int) -> None:
    exports = Exports()
    region = Region(memoryview(bytearray(b"\1" * REGION_BYTES)))
    exports.add(region)
    target = Target("many", exports, TransferSettings(serve_threads=4))
    listeners = [TcpListener("127.0.0.1", 0) for _ in range(count)]
    for listener in listeners:
        target.attach(listener)
    metadata = [listener.metadata().hex() for listener in listeners]
    print(json.dumps({"metadata": metadata, "region_id": region.region_id, "key": region.read_key}), flush=True)
    for _ in sys.stdin:
        print(target.connections, flush=True)
    target.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
