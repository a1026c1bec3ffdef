"""How bytes move: the reactor and frame sessions of the daemons, the channels of clients, and the transfer engine, usable alone:
`from kvstore.transfer import TransferEngine`."""

from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.spans import Span
from kvstore.transfer.paths.transfers import Priority, Transfer

__all__ = ["Priority", "Span", "Transfer", "TransferEngine"]
