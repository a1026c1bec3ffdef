"""Copies by several threads under signals whose handler raises: `python -m tests.transfer.memory.struck_copies SIGNALS`.

After each interrupted copy it overwrites the destination and checks whether a thread still writes there. Prints the number of
signals, and of destinations that were written to afterwards.
"""

import json
import sys
import time

import numpy as np

from kvstore.transfer.memory.memcpy import PARALLEL_BYTES, MemcpyPool
from tests.signals import Striker

SIZE = PARALLEL_BYTES // 2


def main(signals: int) -> None:
    source = np.full(4 * SIZE, 7, np.uint8)
    destination, elsewhere = np.zeros(4 * SIZE, np.uint8), np.zeros(4 * SIZE, np.uint8)
    pairs = [(destination[at : at + SIZE].data, source[at : at + SIZE].data) for at in range(0, 4 * SIZE, SIZE)]
    halves = [(to, (of[: SIZE // 2], of[SIZE // 2 :])) for to, of in pairs]
    copier, striker, written, wrong = MemcpyPool(4), Striker(1), 0, 0
    copier.copy(pairs)  # the pages are there, and the threads
    begun = time.perf_counter()
    copier.copy(pairs)
    within_s = 1.5 * (time.perf_counter() - begun)
    while striker.count < signals:
        begun = time.perf_counter()
        if striker.struck(lambda: copier.gather_and_sum(halves) if striker.count % 2 else copier.copy(pairs), within_s=within_s):
            destination.fill(1)
            np.copyto(elsewhere, source)  # as long as what a thread may have left to do
            written += not (destination == 1).all()
        else:
            within_s = min(within_s, 1.5 * (time.perf_counter() - begun))  # the first time may have been a slow one
            wrong += not (destination == 7).all()
            destination.fill(0)
    print(json.dumps([striker.count, written, wrong]))


main(int(sys.argv[1]))
