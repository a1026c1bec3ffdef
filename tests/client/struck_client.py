"""A client under signals whose handler raises: `python -m tests.client.struck_client ADDRESS SIGNALS [elsewhere]`, the
latter as a remote client.

After each interrupted call another client puts a block, into the interrupted call's slots if they were freed. Prints
the number of signals, of wrong bytes, and of leased connections; keeps its clients until it is stopped.
"""

import json
import random
import sys
import time
import zlib
from collections.abc import Callable

import numpy as np

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.reads import engine_fetch as fetching
from kvstore.client.reads import inline_values as slices
from kvstore.client.writes import engine_put as by_engine
from kvstore.transfer.config import TransferSettings
from tests.signals import Striker

VALUE_BYTES = 1 << 20
HALF = VALUE_BYTES // 2
PART_BYTES = 128 << 10
"""Part size of engine transfers: several parts are in flight in each call."""
RANDOM = np.random.default_rng(0).bytes(8 << 20)
"""Each value is a part of it: generating each from its own seed took most of the time."""
BATCH = 6
OTHERS = 8
"""Blocks of the other client that are there at a time."""


def value_of(key: bytes, size_bytes: int = VALUE_BYTES) -> bytes:
    offset = zlib.crc32(key) % (len(RANDOM) - size_bytes)
    return RANDOM[offset : offset + size_bytes]


class Scene:
    """The calls that are struck, each with what must hold afterwards."""

    def __init__(self, address: str, transports: str) -> None:
        settings = ClientSettings(read_lease_s=3600, view_lease_s=3600)
        self.client = Client(address, settings=settings, deadline_s=60, transfer=TransferSettings(transports=transports))
        self.other = Client(address, settings=settings, deadline_s=60)
        self.wrong = self._serial = 0
        self._keys = [b"mine %d" % i for i in range(BATCH)]
        self._values = [value_of(key) for key in self._keys]
        self._others: dict[bytes, bytes] = {}
        self._fresh: dict[bytes, bytes] = {}
        self._buffers = np.zeros((BATCH, VALUE_BYTES), np.uint8)
        self.client.put_batch(self._keys, self._values)

    def get(self) -> None:
        self._check(self.client.get_batch(self._keys) == self._values)

    def get_into(self) -> None:
        self.client.get_batch_into(self._keys, list(self._buffers))

    def get_parts(self) -> None:
        self.client.get_each_into(self._keys, [[row[: VALUE_BYTES // 3], row[VALUE_BYTES // 3 :]] for row in self._buffers])

    def get_ranges(self) -> None:
        self.client.get_ranges_into(self._keys * 2, [0] * BATCH + [HALF] * BATCH, [*self._buffers[:, :HALF], *self._buffers[:, HALF:]])

    def put_parts(self) -> None:
        self.client.put_batch_from(list(self._fresh), [[value[:HALF], value[HALF:]] for value in self._fresh.values()])

    def get_rows(self) -> None:
        self.client.get_batch_into(self._keys, self._buffers)

    def view(self) -> None:
        with self.client.view(self._keys[0]) as memory:
            self._check(memory is not None and bytes(memory) == self._values[0])

    def put(self) -> None:
        self.client.put_batch(list(self._fresh), list(self._fresh.values()))

    def small(self) -> None:
        key = b"small"
        self.client.put(key, value_of(key, 4096))
        self._check(self.client.get(key) == value_of(key, 4096))

    def match(self) -> None:
        self._check(self.client.match_prefix(self._keys) == BATCH and all(self.client.exists_batch(self._keys)))

    def before(self, call: Callable[[], None]) -> None:
        if call in (self.put, self.put_parts):
            self._serial += 1
            keys = [b"fresh %d %d" % (self._serial, i) for i in range(BATCH)]
            self._fresh = {key: value_of(key[:8]) for key in keys}

    def after(self, call: Callable[[], None], is_struck: bool) -> None:
        if is_struck:
            self._buffers.fill(1)
            self._let_the_other_put()
            self._check(bool((self._buffers == 1).all()))
        elif call in (self.get_into, self.get_rows, self.get_parts, self.get_ranges):
            self._check([bytes(row) for row in self._buffers] == self._values)
        if call in (self.put, self.put_parts):
            found = self.client.get_batch(list(self._fresh))
            self._check(all(got == value or (is_struck and got is None) for got, value in zip(found, self._fresh.values(), strict=True)))
            self.client.remove(list(self._fresh))

    def _let_the_other_put(self) -> None:
        self._serial += 1
        key = b"other %d" % self._serial
        self._others[key] = value_of(key)
        self.other.put(key, self._others[key])
        if len(self._others) > OTHERS:
            self._check(self.other.get_batch(list(self._others)) == list(self._others.values()))
            self.other.remove(list(self._others))
            self._others.clear()

    def _check(self, is_right: bool) -> None:
        self.wrong += not is_right

    def end(self) -> None:
        """Nothing is left in the store, as far as this program knows it; some keys of interrupted puts may be."""
        self._check(self.other.get_batch(list(self._others)) == list(self._others.values()))
        self.get()
        self.client.remove([*self._keys, *self._others, b"small"])

    def lent(self) -> int:
        """Connections in use, but for those that are its desks' at nodes."""
        pool, desks = self.client._driver.pool, len(self.client._operations.local.ready)
        return sum(pool.counts(address)[0] for address in list(pool._state._endpoints)) - desks


def main() -> None:
    address, signals, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for module, name in ((by_engine, "PART_BYTES"), (fetching, "SLICE_BYTES"), (slices, "SLICE_BYTES")):
        setattr(module, name, PART_BYTES)
    scene, striker = Scene(address, "tcp" if where == "elsewhere" else "auto"), Striker(1)
    calls = [
        scene.get,
        scene.get_into,
        scene.get_rows,
        scene.get_parts,
        scene.get_ranges,
        scene.view,
        scene.put,
        scene.put,
        scene.put_parts,
        scene.small,
        scene.match,
    ]
    within_s = {}
    for call in calls:
        scene.before(call)
        begun = time.perf_counter()
        call()
        within_s[call] = 1.2 * (time.perf_counter() - begun)
        scene.after(call, is_struck=False)
    chosen = random.Random(2)
    while striker.count < signals:
        call = chosen.choice(calls)
        scene.before(call)
        begun = time.perf_counter()
        is_struck = striker.struck(call, within_s=within_s[call])
        if not is_struck:  # the first time may have been a slow one: signals would come when all is over
            within_s[call] = min(within_s[call], 1.2 * (time.perf_counter() - begun))
        scene.after(call, is_struck)
    scene.end()
    print(json.dumps([striker.count, scene.wrong, scene.lent()]), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
