"""A process that shows regions over shared memory and closes them on demand: RUN_DIR COUNT SIZE_BYTES.

Tells how it is reached in one line of JSON. Each line on its standard input, the number of a region, has it close that region; it
answers with null.
"""

import json
import os
import sys
from pathlib import Path

from kvstore.transfer.agent import Rail
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapped_memory import allocate
from kvstore.transfer.memory.region import RemoteRegion
from kvstore.transfer.shm.agent import SharedMemoryAgent
from tests.line_child import LineChild


class SharedOwner(LineChild):
    """The process, seen from its parent. A context manager: killed at the end."""

    def __init__(self, run_dir: Path, *, count: int, size_bytes: int, can_write: bool = True) -> None:
        super().__init__("tests.transfer.shm.owner", str(run_dir), str(count), str(size_bytes))
        told = self.answer()
        self.metadata = bytes.fromhex(told["metadata"])
        self.regions = [
            RemoteRegion(region_id, size_bytes, keys[can_write], {"shm": bytes.fromhex(descriptor)})
            for region_id, keys, descriptor in told["regions"]
        ]

    def close_region(self, number: int) -> None:
        self.tell(str(number))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))


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
        print("null", flush=True)


if __name__ == "__main__":
    main()
