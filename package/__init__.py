"""A distributed, multi-tier store for the KV cache of large language models: `from kvstore import Client`.

The folders beside this file are the package's: pyproject.toml maps them, and ARCHITECTURE.md says what each is.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvstore.protocol.version import VERSION

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]
__version__ = VERSION

if not TYPE_CHECKING:  # to a type checker it would say that the package has whatever is asked of it

    def __getattr__(name: str) -> object:
        """Clients are loaded when they are asked for: a daemon needs none."""
        if name not in ("AsyncClient", "Client"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("kvstore.client"), name)
