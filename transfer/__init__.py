"""Transfer engine: moves bytes between registered memory of processes. Usable alone: `from kvstore.transfer import
TransferEngine`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.transfer.engine import TransferEngine
    from kvstore.transfer.paths.batch import Runs, Span
    from kvstore.transfer.paths.transfers import Priority, Transfer

__all__ = ["Priority", "Runs", "Span", "Transfer", "TransferEngine"]

_MODULES = {
    "Priority": "paths.transfers",
    "Runs": "paths.batch",
    "Span": "paths.batch",
    "Transfer": "paths.transfers",
    "TransferEngine": "engine",
}

if not TYPE_CHECKING:  # a type checker would accept any name of the package

    def __getattr__(name: str) -> object:
        """Import lazily: the master parses descriptions of engines without having one."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
