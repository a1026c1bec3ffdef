"""A node's block table that gives few slots to few keys as fast as it can, and a reader in another process: how many bytes were wrong.

`python -m tests.client.local.stress SECONDS`, and a row of `make bench`.
"""

import mmap
import os
import random
import signal
import sys
import time
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.protocol.shared_index import Words
from tests.store.tables import Found, LocalClient, Store, still

KEYS, SLOTS, SLOT_BYTES = 6, 3, 16 << 10
WORDS = SLOT_BYTES // 8


class Counts(NamedTuple):
    reused: int
    """Slots that the writer gave to another block."""
    read: int
    """Copies that the reader took for good."""
    refused: int
    """Copies that it threw away, for their entry had changed."""
    viewed: int
    wrong: int
    """Copies and views that were not one key's value, whole and unchanging."""


def stress(seconds: float) -> Counts:
    """One writer, one reader, for so long."""
    store = Store(SLOTS * SLOT_BYTES, slab_bytes=SLOTS * SLOT_BYTES)
    client = store.client()
    put(store, 0)  # the slab is there before the reader forks off
    begun = store._generation
    shared: Words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint64)
    writer = os.fork()
    if not writer:
        try:
            write(store, shared)
        finally:
            os._exit(1)
    try:
        counts = read(client, seconds)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        store.close()
    return counts._replace(reused=int(shared[0]) - begun)


def put(store: Store, key: int) -> None:
    opened = store.open(f"key-{key}", SLOT_BYTES)
    if opened is None:
        return
    word = key << 40 | opened.block.generation
    np.frombuffer(store.dram.view(opened.slot), np.uint64).fill(word)
    store.table.commit(opened, xxhash.xxh3_64_intdigest(store.dram.view(opened.slot)))


def write(store: Store, shared: Words) -> None:
    chosen = random.Random(1)
    while True:
        key = chosen.randrange(KEYS)
        block = store.table.find("red", b"key-%d" % key)
        if block is not None:
            store.table.copies.drop(block)
        put(store, key)
        store.shared_index.release_unprotected()
        store.events.clear()
        shared[0] = store._generation


def read(client: LocalClient, seconds: float) -> Counts:
    good = refused = viewed = wrong = turn = 0
    buffer = np.zeros(WORDS, np.uint64)
    memory = buffer.view(np.uint8).data
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        turn += 1
        key = turn % KEYS
        found = client.find(f"key-{key}")
        if found is None:
            continue
        if turn % 4 == 0:
            viewed, wrong = viewed + 1, wrong + (not view_is_right(client, found, key))
            continue
        memory[:] = client.memory(found)
        if not still(client.index, found):
            refused += 1
        elif is_value(buffer, key):
            good += 1
        else:
            wrong += 1
    return Counts(0, good, refused, viewed, wrong)


def view_is_right(client: LocalClient, found: Found, key: int) -> bool:
    """Return whether a view, if one can be opened, shows the key's value until it is closed."""
    hazard = client.desk.acquire_hazard(client.index, found)
    if hazard is None:
        return True
    try:
        words = np.frombuffer(client.memory(found), np.uint64)
        first = int(words[0])
        return all(is_value(words, key) and int(words[0]) == first for _ in range(3))
    finally:
        client.desk.release_hazard(hazard)


def is_value(words: Words, key: int) -> bool:
    return int(words[0]) >> 40 == key and bool((words == words[0]).all())


if __name__ == "__main__":
    print(stress(float(sys.argv[1])))
