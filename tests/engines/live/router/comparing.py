"""Answers of an engine and of a router, field by field: what may differ is taken away, and a stream's chunks are joined."""

import contextlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.engines.live.http_engine import PATIENCE_S
from tests.engines.live.router.fleet import MODEL, connection
from tests.system.running import until

MAY_DIFFER: Final = frozenset(
    ("id", "created", "system_fingerprint", "created_at", "completed_at", "item_id", "response_id", "sequence_number", "request_id")
)
REPEATED: Final = frozenset({"index", "role", "type", "object", "model", "finish_reason", "stop_reason", "name", "logprob", "delta_type"})
"""Members of chunks whose last value counts; other texts are pieces of one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Of either."""

    status: int
    content_type: str
    body: Any
    """Without what may differ; of a stream, its chunks as one."""
    headers: Mapping[str, str]
    response_id: str


def ask(url: str, path: str, body: Any, *, method: str = "POST") -> Reply:
    """Of the server at `url`. `body`: JSON, or bytes as they are."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with contextlib.closing(connection(url)) as asked:
        asked.request(method, path, data, {"content-type": "application/json"})
        response = asked.getresponse()
        return _reply(response, response.read())


def body_of(members: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, **members}


def through(url: str, path: str, members: dict[str, Any]) -> Reply:
    """By the router at `url`. Asked again, as clients do, while no engine is known to it."""
    found: list[Reply] = []

    def answers() -> bool:
        found.append(ask(url, path, body_of(members)))
        return found[-1].status not in (429, 503)

    until(answers, "an answer of the router", PATIENCE_S)
    return found[-1]


def _reply(response: http.client.HTTPResponse, raw: bytes) -> Reply:
    content_type = response.headers.get("content-type", "").partition(";")[0]
    if content_type == "text/event-stream":
        frames = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: ")]
        is_done = frames[-1:] == [b"[DONE]"]
        chunks = [json.loads(frame) for frame in frames if frame != b"[DONE]"]
        body: Any = {"joined": joined(chunks), "is_done": is_done}
        ids = [(chunk.get("response") or chunk).get("id", "") for chunk in chunks] or [""]
        response_id = ids[0]
    else:
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw.decode()
        response_id = body.get("id", "") if isinstance(body, dict) else ""
    return Reply(response.status, content_type, _stripped(body), dict(response.headers), response_id)


def joined(chunks: list[Any]) -> Any:
    """Of the chunks of a stream: choices by their index, texts one after the other."""
    if any("choices" not in chunk for chunk in chunks):  # the events of /v1/responses, or an error
        return _joined_events(chunks)
    whole: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _merge(whole["choices"].setdefault(str(choice["index"]), {}), choice)
        _merge(whole, {name: value for name, value in chunk.items() if name != "choices" and value is not None})
    return whole


def _joined_events(events: list[Any]) -> list[Any]:
    """One after the other; those of one kind that follow each other are one."""
    found: list[Any] = []
    for event in events:
        if found and isinstance(event.get("delta"), str) and found[-1].get("type") == event.get("type"):
            found[-1]["delta"] += event["delta"]
            found[-1].get("logprobs", []).extend(event.get("logprobs") or [])
        else:
            found.append(dict(event))
    return found


def _merge(into: dict[str, Any], chunk: dict[str, Any]) -> None:
    for name, value in chunk.items():
        old = into.get(name)
        if old is None or name in REPEATED:
            into[name] = value if value is not None or old is None else old
        elif isinstance(value, str) and name not in MAY_DIFFER and isinstance(old, str):
            into[name] = old + value
        elif isinstance(value, list) and name == "tool_calls":
            _merge_calls(old, value)
        elif isinstance(value, list):
            into[name] = old + value
        elif isinstance(value, dict):
            _merge(old, value)
        elif value is not None:
            into[name] = value


def _merge_calls(into: list[Any], calls: list[Any]) -> None:
    for call in calls:
        same = [old for old in into if old.get("index") == call.get("index")]
        if same:
            _merge(same[0], call)
        else:
            into.append(call)


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stripped(inner) for name, inner in value.items() if name not in MAY_DIFFER}
    return [_stripped(inner) for inner in value] if isinstance(value, list) else value
