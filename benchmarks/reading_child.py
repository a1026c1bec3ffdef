"""A client process that reads blocks of 1 MiB of a node on its host as fast as it can: `python -m benchmarks.reading_child ADDRESS KEYS`.

Once it says "ready" it reads for as many seconds as each line of its input says, and prints how many blocks that were.
"""

import sys
import time

import numpy as np

from kvstore.client import Client

BATCH = 8


def main(address: str, text: str) -> None:
    keys = [bytes.fromhex(key) for key in text.split(",")]
    with Client(address) as client:
        buffers = np.ones((BATCH, 1 << 20), np.uint8)
        client.get_batch_into(keys[:BATCH], buffers)
        print("ready", flush=True)
        for line in sys.stdin:
            until_s, blocks = time.monotonic() + float(line), 0
            while time.monotonic() < until_s:
                start = blocks % (len(keys) - BATCH)
                assert None not in client.get_batch_into(keys[start : start + BATCH], buffers)
                blocks += BATCH
            print(blocks, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
