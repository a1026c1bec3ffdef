"""An engine in another process, for tests: `python -m tests.transfer.engine_child TRANSPORTS`.

Prints its description as a line of JSON, then replies to requests on standard input.
"""

import json
import sys

import numpy as np
import xxhash

from kvstore.protocol.settings import Size
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine

REGION_BYTES = 256 << 10


def main() -> None:
    with TransferEngine("child", TransferSettings(transports=sys.argv[1], rails="lo", slice_bytes=Size(64 << 10))) as engine:
        shared, plain = engine.allocate(REGION_BYTES), engine.register(bytearray(np.random.default_rng(1).bytes(REGION_BYTES)))
        shared.memory[:] = np.random.default_rng(0).bytes(REGION_BYTES)
        exports = engine.export(shared, writable=True), engine.export(shared), engine.export(plain)
        print(json.dumps([engine.describe().hex(), *(text.hex() for text in exports)]), flush=True)
        for line in sys.stdin:
            if line.split()[0] == "notifications":
                told = [text for name, message in engine.notifications() for text in (name, message.decode())]
            elif line.split()[0] == "served":
                told = [str(engine.served_bytes), str(engine.served_connections)]
            else:
                told = [xxhash.xxh3_64_hexdigest(shared.memory)]
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
