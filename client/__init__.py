"""Python client: `Client`, `AsyncClient`; `Memory`, a buffer given by its address; `Hold` and `new_hold`, for lookups
that keep what they find; `Retention`, a hint for the order of eviction."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient
    from kvstore.client.holds import Hold, new_hold
    from kvstore.client.memory import Memory
    from kvstore.client.sync import Client
    from kvstore.protocol.retention import Retention

__all__ = ["AsyncClient", "Client", "Hold", "Memory", "Retention", "new_hold"]

_MODULES = {
    "AsyncClient": "client.aio",
    "Client": "client.sync",
    "Hold": "client.holds",
    "Memory": "client.memory",
    "Retention": "protocol.retention",
    "new_hold": "client.holds",
}

if not TYPE_CHECKING:  # a type checker would accept any attribute

    def __getattr__(name: str) -> object:
        """Import a class at first use: a command that contacts no node needs neither asyncio nor the transfer
        engine."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"kvstore.{_MODULES[name]}"), name)
