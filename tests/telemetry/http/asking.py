"""Questions to an HTTP server of the tests, from a thread of theirs."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    status: int
    text: str
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.text)


def ask(address: str, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, body: bytes | None = None) -> Answer:
    """Response of `address` (HOST:PORT), of any status. Raises OSError if nothing listens there."""
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers or {}, data=body)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return Answer(response.status, response.read().decode(), dict(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), dict(error.headers))
