"""A process that shows regions over shared memory and closes them on demand: RUN_DIR COUNT SIZE_BYTES.

Tells how it is reached in one line of JSON. Each line on its standard input, the number of a region, has it close that region; it
answers with an empty line.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.transfer.agent import Rail
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapping import allocate
from kvstore.transfer.memory.region import RemoteRegion
from kvstore.transfer.shm.agent import SharedMemoryAgent


class SharedOwner:
    """The process, seen from its parent. A context manager: it is gone at the end."""

    def __init__(self, run_dir: Path, *, count: int, size_bytes: int, can_write: bool = True) -> None:
        command: Sequence[str] = [sys.executable, __file__, str(run_dir), str(count), str(size_bytes)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        told = json.loads(self._line() or "null")
        assert told is not None, "the process failed: see its standard error"
        self.metadata = bytes.fromhex(told["metadata"])
        self.regions = [
            RemoteRegion(region_id, size_bytes, keys[can_write], {"shm": bytes.fromhex(descriptor)})
            for region_id, keys, descriptor in told["regions"]
        ]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close_region(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        self._line()

    def stop(self) -> None:
        """It does not run from here on."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self) -> "SharedOwner":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    run_dir, count, size_bytes = sys.argv[1:]
    agent = SharedMemoryAgent("owner", Rail(), TransferSettings(), run_dir=Path(run_dir))
    regions = [allocate(int(size_bytes)) for _ in range(int(count))]
    for number, region in enumerate(regions):
        region.memory[:] = bytes([number % 256]) * region.size_bytes
    told = [(region.region_id, (region.read_key, region.write_key), (agent.export(region) or b"").hex()) for region in regions]
    print(json.dumps({"metadata": agent.metadata().hex(), "regions": told}), flush=True)
    for line in sys.stdin:
        regions[int(line)].close()
        print(flush=True)


if __name__ == "__main__":
    main()
