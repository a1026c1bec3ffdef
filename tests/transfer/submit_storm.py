"""Submits of a main thread under a storm of signals whose handler raises: `-m tests.transfer.submit_storm TRANSPORTS COUNT`.

Interrupts `submit` until COUNT exceptions were raised. Prints a line of JSON: how often a transfer still held its
region, and whether transfers still work without signals.
"""

import json
import sys
from contextlib import suppress

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.transfers import Transfer
from tests.line_child import LineChild
from tests.transfer.signal_storm import SIZE, Storm

LONGEST_S = 0.0004
"""Of the time to the next signal: a submit takes about as long."""


def main() -> None:
    transports, count = sys.argv[1], int(sys.argv[2])
    storm = Storm(TransferEngine.submit, count, longest_s=LONGEST_S)
    settings = TransferSettings(transports=transports, rails="lo", slice_bytes=Size(64 << 10), shm_slice_bytes=Size(64 << 10))
    came_out = left = 0
    with LineChild("tests.transfer.engine_child", transports) as child, TransferEngine("struck", settings) as engine:
        description, shared, *_ = (bytes.fromhex(text) for text in child.answer())
        remote = engine.import_region(engine.connect(description), shared)
        ours, begun = engine.allocate(SIZE), list[Transfer]()

        def submit() -> None:
            begun.append(engine.submit([(remote, ours, SIZE)]))

        while came_out < count:
            is_struck = storm.over(submit)
            came_out += is_struck
            left += is_struck and ours.users > 0
            while begun:
                with suppress(KVStoreError):
                    begun.pop().wait()
            eventually(lambda: ours.users == 0, "the region is let go")
        theirs, found = bytes([1]) * SIZE, bytearray(SIZE)
        engine.transfer([(theirs, remote, SIZE)])
        engine.transfer([(remote, found, SIZE)])
    print(json.dumps([left, found == theirs]), flush=True)


if __name__ == "__main__":
    main()
