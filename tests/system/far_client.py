"""A client in a process of its own, for tests on another host. It executes each line of its standard input and responds with a
line. Lines are JSON.

By default it maps no memory of its host, which network namespaces share, so values arrive by the transfer engine or in messages.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from kvstore.client.config import ClientSettings
from kvstore.client.connections.engine_copies import COOLDOWN_S
from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.settings import Size
from kvstore.transfer.config import TransferSettings
from tests.forked import Forked
from tests.namespaces import TwoHosts
from tests.system.history import value_of

DEADLINE_S = 60.0


class FarClient:
    """The test's side. A context manager."""

    def __init__(
        self, hosts: TwoHosts, host: int, address: str, *, transports: str = "tcp", prefix: Sequence[str] = (), **settings: float
    ) -> None:
        arguments = [address, transports, json.dumps(settings)]
        self._process: Forked | subprocess.Popen[str]
        if prefix:
            command = [*prefix, sys.executable, "-m", "tests.system.far_client", *arguments]
            self._process = hosts.start(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        else:
            name = hosts.names[host]
            self._process = Forked(
                "tests.system.far_client", arguments, environment=os.environ, host=name, has_input=True, stderr=sys.__stderr__
            )

    def put(self, keys: Sequence[str], size_bytes: int) -> dict[str, Any]:
        """Put each key's value: `done` is what put_batch gave, or the error's name."""
        return self._ask("put", keys, size_bytes)

    def get(self, keys: Sequence[str], size_bytes: int) -> dict[str, Any]:
        """Get them: `done` says of each whether it came as it was put (None: a miss), or is the error's name."""
        return self._ask("get", keys, size_bytes)

    def rest(self) -> None:
        """From now on as much later for it as it leaves a node's engine alone that failed."""
        self._ask("rest", [], 0)

    def _ask(self, what: str, keys: Sequence[str], size_bytes: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, "keys": list(keys), "size_bytes": size_bytes}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdout:
            self._process.stdin.close()
            assert self._process.wait(DEADLINE_S) == 0


def main() -> None:
    settings = ClientSettings(engine_min_bytes=Size(1), ack="cluster", **json.loads(sys.argv[3]))  # for another client to get at once
    transfer = TransferSettings(transports=sys.argv[2])
    with Client(sys.argv[1], settings=settings, transfer=transfer) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            keys = [key.encode() for key in asked["keys"]]
            values = [value_of(key, 0, asked["size_bytes"]) for key in keys]
            before = client.stats().engine_bytes
            begun_s = time.monotonic()
            done: Any
            try:
                if asked["what"] == "rest":
                    remote = client._operations.resources.engine_copies.remote
                    remote._clock_ns = lambda: time.monotonic_ns() + int(COOLDOWN_S * 1e9)
                    done = True
                elif asked["what"] == "put":
                    done = client.put_batch(keys, values)
                else:
                    found = client.get_batch(keys)
                    done = [None if one is None else one == value for one, value in zip(found, values, strict=True)]
            except KVStoreError as error:
                done = type(error).__name__
            answer = {"done": done, "engine_bytes": client.stats().engine_bytes - before, "seconds": time.monotonic() - begun_s}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
