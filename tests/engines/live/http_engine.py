"""A server of an engine, asked over HTTP."""

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.engines.live import process_group

PATIENCE_S: Final = 900.0
STOP_S: Final = 20.0
POLL_S: Final = 0.2


class HttpEngine:
    """An engine's HTTP server, running from construction to `close`, in a process group of its own with its child processes."""

    def __init__(self, port: int, command: Sequence[Any], log: Path, environment: Mapping[str, str] | None = None, **popen: Any) -> None:
        """Start the engine and return before it is ready. `log` receives its output."""
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self._log = log
        with log.open("ab") as output:
            self._process = process_group.start(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, **popen
            )

    def wait(self, health: str = "/health") -> Self:
        """Wait until it responds."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get(health)
                return self
            assert self._process.poll() is None, self.log
            assert time.monotonic() < end_s, self.log
            time.sleep(POLL_S)  # only its port shows that it is ready

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def metric(self, name: str) -> float:
        """Value of a counter in its /metrics, of all labels."""
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the response to a POST, decoded from JSON. Raises HTTPError for a status other than 200."""
        text = self._ask(path, json.dumps(body).encode() if body is not None else b"")
        return json.loads(text) if text else None

    def get(self, path: str) -> bytes:
        """Return the body of the response to a GET."""
        return self._ask(path, None)

    def _ask(self, path: str, data: bytes | None) -> bytes:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
            found: bytes = answer.read()
            return found

    def close(self) -> None:
        self._process.terminate()
        process_group.end(self._process, STOP_S)
