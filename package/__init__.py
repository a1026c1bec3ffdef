"""A distributed, multi-tier store for the KV cache of large language models: `from kvstore import Client`.

pyproject.toml maps the folders beside this file to the package's modules; ARCHITECTURE.md describes them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvstore.protocol.version import VERSION

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]
__version__ = VERSION

if not TYPE_CHECKING:  # a type checker would accept any attribute of the package

    def __getattr__(name: str) -> object:
        """Import the clients on first use: daemons need neither."""
        if name not in ("AsyncClient", "Client"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("kvstore.client"), name)
