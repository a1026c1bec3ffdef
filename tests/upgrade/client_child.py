"""`client_child.py MASTER NAME`: a client of the imported release puts values, and gets all values that earlier clients put."""

import hashlib
import sys
import time

from kvstore.client import Client
from kvstore.protocol.errors import Unavailable

COUNT = 40
PATIENCE_S = 60


def key(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name} {at}".encode()).digest()[:16]


def value(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name} {at}".encode()).digest() * (1 + at * at * 16)


def put_all(client: Client, name: str) -> list[bool]:
    """Again while no node has come back to a master that was started again: a client of the release before does not wait for one."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.put_batch([key(name, at) for at in range(COUNT)], [value(name, at) for at in range(COUNT)], ack="cluster")
        except Unavailable:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def main() -> None:
    master, name, *earlier = sys.argv[1:]
    with Client(master, deadline_s=60) as client:
        stored = put_all(client, name)
        assert all(stored), stored
        for whose in (name, *earlier):
            keys = [key(whose, at) for at in range(COUNT)]
            assert client.get_batch(keys) == [value(whose, at) for at in range(COUNT)], whose
            assert client.match_prefix(keys) == COUNT
        client.pin(keys[:1])
        assert client.remove(keys[1:2])
        assert client.get(keys[1]) is None
        client.put(keys[1], value(whose, 1), ack="cluster")
    print("done", flush=True)


if __name__ == "__main__":
    main()
