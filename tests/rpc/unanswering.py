"""Unresponsive addresses, and hosts with several addresses, for tests of connecting."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


@contextmanager
def black_hole() -> Iterator[tuple[str, int]]:
    """Yield an address that neither accepts nor refuses connections: the backlog of its listener is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        try:
            with suppress(TimeoutError):
                while True:
                    waiting.append(socket.create_connection(listener.getsockname(), timeout=0.2))
            yield listener.getsockname()
        finally:
            for sock in waiting:
                sock.close()


def has_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Make every name resolve to these addresses."""
    found: list[Any] = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **keywords: found)
