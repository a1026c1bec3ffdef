"""Jobs under signals whose handler raises: `python -m tests.client.jobs.struck_jobs ADDRESS SIGNALS`.

Each round submits jobs, cancels or closes until that has returned once, and then writes into all memory that the jobs had: what they read
or fill afterwards is wrong. Prints the number of signals, how often a byte was wrong, and what jobs are left over.
"""

import json
import random
import sys
import time

import numpy as np

from kvstore.client import Client
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.jobs import Jobs
from kvstore.protocol.settings import Size
from tests.signals import Striker

COUNT, VALUE_BYTES = 12, 256 << 10
SETTINGS = JobSettings(lookup_deadline_s=60, load_deadline_s=60, store_deadline_s=60, batch_bytes=Size(2 * VALUE_BYTES))


class Scene:
    """The rounds that are struck, and what must hold afterwards."""

    def __init__(self, address: str) -> None:
        self.client = Client(address, deadline_s=60)
        self.jobs = Jobs(self.client, SETTINGS)
        self.keys = [b"loaded %d" % i for i in range(COUNT)]
        self.values = np.random.default_rng(0).integers(0, 256, (COUNT, VALUE_BYTES), np.uint8)
        self.client.put_batch(self.keys, self.values)
        self.buffers = np.empty_like(self.values)
        self.stored = np.empty_like(self.values)
        self.wrong = self.serial = 0
        self.fresh: list[bytes] = []

    def begin(self) -> None:
        self.serial += 1
        self.fresh = [b"stored %d %d" % (self.serial, i) for i in range(COUNT)]
        self.stored[:] = self.values

    def cancelled(self) -> None:
        self.jobs.load(self.keys, self.buffers, request="load")
        self.jobs.store(self.fresh, self.stored, request="store")
        self.jobs.match_prefix(self.keys)
        self.jobs.finished()
        self.jobs.cancel("load")
        self.jobs.cancel("store")

    def closed(self) -> None:
        self.jobs.load(self.keys, self.buffers)
        self.jobs.store(self.fresh, self.stored)
        self.jobs.close(drain_s=60)

    def end(self, is_closed: bool) -> None:
        """Unstruck: nothing uses the memory once these have returned."""
        if is_closed:
            self.jobs.close()
            self.jobs = Jobs(self.client, SETTINGS)
        for request in ("load", "store"):
            self.jobs.cancel(request)
        self.buffers.fill(1)
        self.stored.fill(1)
        self.jobs.finished()
        found = self.client.get_batch(self.fresh)
        self.wrong += any(value is not None and value != right.tobytes() for value, right in zip(found, self.values, strict=True))
        self.wrong += not (self.buffers == 1).all()
        self.client.remove(self.fresh)


def main() -> None:
    address, signals = sys.argv[1], int(sys.argv[2])
    scene, striker, chosen = Scene(address), Striker(1), random.Random(2)
    within_s = {}
    for round_ in (scene.cancelled, scene.closed):
        scene.begin()
        begun = time.perf_counter()
        round_()
        within_s[round_] = 1.2 * (time.perf_counter() - begun)
        scene.end(is_closed=round_ == scene.closed)
    while striker.count < signals:
        round_ = scene.closed if chosen.random() < 0.3 else scene.cancelled
        scene.begin()
        begun = time.perf_counter()
        if not striker.struck(round_, within_s=within_s[round_]):  # the first time may have been a slow one
            within_s[round_] = min(within_s[round_], 1.2 * (time.perf_counter() - begun))
        scene.end(is_closed=round_ == scene.closed)
    scene.begin()
    works = scene.jobs.load(scene.keys, scene.buffers, request="last").wait(60) and bool((scene.buffers == scene.values).all())
    stats = scene.jobs.stats()
    scene.jobs.close()
    print(json.dumps([striker.count, scene.wrong, works, stats.waiting + stats.running + stats.held_bytes]), flush=True)


if __name__ == "__main__":
    main()
