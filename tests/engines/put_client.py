"""A client that records puts."""

from typing import Any

from tests.client.jobs.faulty import FaultyClient


class PutClient(FaultyClient):
    """Client that records the keys of its puts, their parents and their label."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.puts: list[tuple[list[bytes], list[bytes | None], Any]] = []

    def put_batch_from(self, keys: Any, values: Any, **more: Any) -> Any:
        self.puts.append((list(keys), list(more["parents"]), more["namespace"]))
        return super().put_batch_from(keys, values, **more)
