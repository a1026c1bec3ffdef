"""Client and AsyncClient: `from kvstore.client import Client`; Memory, a buffer that is a pointer; and `new_hold`, for lookups."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient
    from kvstore.client.holds import Hold, new_hold
    from kvstore.client.memory import Memory
    from kvstore.client.sync import Client

__all__ = ["AsyncClient", "Client", "Hold", "Memory", "new_hold"]

_MODULES = {"AsyncClient": "aio", "Client": "sync", "Hold": "holds", "Memory": "memory", "new_hold": "holds"}

if not TYPE_CHECKING:  # to a type checker it would say that the package has whatever is asked of it

    def __getattr__(name: str) -> object:
        """Loaded when it is asked for: a command that talks to no node needs neither asyncio nor the transfer engine."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
