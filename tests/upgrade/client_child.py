"""`client_child.py MASTER NAME`: a client of whichever release is imported puts values, and gets all that was put by clients before it."""

import hashlib
import sys

from kvstore.client import Client

COUNT = 40


def key(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name} {at}".encode()).digest()[:16]


def value(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name} {at}".encode()).digest() * (1 + at * at * 16)


def main() -> None:
    master, name, *earlier = sys.argv[1:]
    with Client(master, deadline_s=60) as client:
        stored = client.put_batch([key(name, at) for at in range(COUNT)], [value(name, at) for at in range(COUNT)], ack="cluster")
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
