"""Client and AsyncClient: `from kvstore.client import Client`."""

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client

__all__ = ["AsyncClient", "Client"]
