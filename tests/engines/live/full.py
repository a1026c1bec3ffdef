"""A store that is full, for tests of what its engines do then."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.client import Client
from kvstore.protocol.errors import DeadlineExceeded, Full


@contextmanager
def filled(client: Client) -> Iterator[None]:
    """Fill the store with pinned blocks, so that a put finds no space and no victim. Unpin and remove them afterwards."""
    pinned: list[bytes] = []
    for size_bytes in (1 << 20, 1 << 17, 1 << 13):
        try:
            while True:
                key = f"pinned-{len(pinned)}".encode()
                client.put(key, bytes(size_bytes), ack="cluster", deadline_s=2.0)
                client.pin([key])
                pinned.append(key)
        except (Full, DeadlineExceeded):
            pass
    try:
        yield
    finally:
        client.unpin(pinned)
        client.remove(pinned, force=True)
