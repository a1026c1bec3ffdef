"""A client that records puts."""

from typing import Any

from kvstore.protocol.retention import Retention
from tests.client.jobs.faulty import FaultyClient


class PutClient(FaultyClient):
    """Client that records the keys of its puts, their parents and their label, and the hints of puts and gets."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.puts: list[tuple[list[bytes], list[bytes | None], Any]] = []
        self.hints: list[Retention | None] = []

    def put_batch_from(self, keys: Any, values: Any, **more: Any) -> Any:
        self.puts.append((list(keys), list(more["parents"] or [None] * len(keys)), more["namespace"]))
        self.hints.append(more["retention"])
        return super().put_batch_from(keys, values, **more)

    def get_each_into(self, keys: Any, buffers: Any, **more: Any) -> Any:
        self.hints.append(more["retention"])
        return super().get_each_into(keys, buffers, **more)
