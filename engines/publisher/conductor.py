"""Mooncake Conductor's HTTP API over the index: `/register`, `/unregister` and `/query`, in JSON and MessagePack.

Requests are accepted in three forms: of the reference, of servers of 2026, and in MessagePack. They differ in spelling
and members, not in meaning. Every response has the members of all forms. `/query` lists instances under the tenant
(reference) and under `instances` (servers of 2026), with both spellings of each medium. Other members are ignored,
including `hash_profile`: blocks are compared by tokens.

Source: Mooncake, docs/source/api-reference/http/conductor-indexer.md; mooncake-conductor, event_manager.cpp and
example/cache_aware_disagg_proxy.py of 2026.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from kvstore.engines.kv_events.events import CPU, DISK, GPU
from kvstore.engines.publisher.index import EngineBlockIndex
from kvstore.engines.publisher.prefix_table import Context, InstanceMatch, Service
from kvstore.protocol.errors import InvalidArgument
from kvstore.telemetry.http.access import AccessLevel
from kvstore.telemetry.http.aiohttp_server import refusal
from kvstore.telemetry.http.server import Handler, HttpServer, run_in_thread

DEFAULT_TENANT: Final = "default"
TYPES: Final = ("vllm", "sglang")
MAX_BLOCK_TOKENS: Final = 65_536
MAX_RANK: Final = (1 << 31) - 1
MAX_BODY_BYTES: Final = 16 << 20
"""A million token ids in JSON."""
MSGPACK: Final = ("application/msgpack", "application/x-msgpack")


@dataclass(frozen=True, slots=True)
class Query:
    """Request for the instances' matches of these tokens; `instance`: only that one."""

    context: Context
    token_ids: list[int]
    instance: str | None


def read_registration(body: Any) -> Service:
    """Parse a `/register`. Raises InvalidArgument, which names the member."""
    body = _members(body)
    kind = _text(body, "type")
    if kind.lower() not in TYPES:
        raise InvalidArgument(f"type is {kind!r}: register vLLM or SGLang, whose events have token ids; kvstore needs no registration")
    context = Context(
        _text(body, "tenant_id", DEFAULT_TENANT),
        _text(body, "modelname"),
        _text(body, "lora_name", ""),
        _text(body, "additionalsalt", ""),
        _number(body, "block_size", 1, MAX_BLOCK_TOKENS),
    )
    where = _text(body, "endpoint"), _text(body, "replay_endpoint", "")
    return Service(context, _text(body, "instance_id"), _number(body, "dp_rank", 0, MAX_RANK), *where)


def read_unregistration(body: Any) -> str:
    """Parse an `/unregister`; return the service's name. Raises InvalidArgument, which names the member."""
    body = _members(body)
    tenant = _text(body, "tenant_id", DEFAULT_TENANT)
    return f"{_text(body, 'instance_id')}|{tenant}|{_number(body, 'dp_rank', 0, MAX_RANK)}"


def read_query(body: Any) -> Query:
    """Parse a `/query`. Raises InvalidArgument, which names the member."""
    body = _members(body)
    context = Context(
        _text(body, "tenant_id", DEFAULT_TENANT),
        _text(body, "model"),
        _text(body, "lora_name", ""),
        _text(body, "cache_salt", ""),
        _number(body, "block_size", 1, MAX_BLOCK_TOKENS),
    )
    return Query(context, _tokens(body.get("token_ids")), _text(body, "instance_id", "") or None)


def registered(service: Service) -> dict[str, Any]:
    return {"status": "registered successfully", "instance_id": service.instance}


def unregistered(service: Service) -> dict[str, Any]:
    return {"status": "unregistered successfully", "removed_instances": [service.name]}


def matches(tenant: str, found: Mapping[str, InstanceMatch]) -> dict[str, Any]:
    """Return the response to a `/query`."""
    instances = {name: _instance(match) for name, match in found.items()}
    return {"instances": instances, tenant: instances}


def add_index(server: HttpServer, index: EngineBlockIndex) -> None:
    """Add the routes. Registration needs ADMIN access, because it makes this process connect to other hosts."""

    def register(body: Any) -> dict[str, Any]:
        service = read_registration(body)
        index.add(service)
        return registered(service)

    def unregister(body: Any) -> dict[str, Any] | None:
        service = index.remove(read_unregistration(body))
        return None if service is None else unregistered(service)

    def query(body: Any) -> dict[str, Any]:
        read = read_query(body)
        return matches(read.context.tenant, index.match(read.context, read.token_ids, instance=read.instance))

    server.add("POST", "/register", _handler(register), needs=AccessLevel.ADMIN)
    server.add("POST", "/unregister", _handler(unregister), needs=AccessLevel.ADMIN)
    server.add("POST", "/query", _handler(query), needs=AccessLevel.READ)


def _instance(match: InstanceMatch) -> dict[str, Any]:
    ranks = {str(rank): {"gpu": each.gpu, "cpu": each.cpu, "disk": each.disk} for rank, each in match.ranks.items()}
    by_rank = {rank: each["gpu"] for rank, each in ranks.items()}
    up_to = {medium: max(each[medium] for each in ranks.values()) for medium in (GPU, CPU, DISK)}
    alone = {medium.upper(): tokens for medium, tokens in match.alone.items()}
    return {"longest_matched": match.longest, "DP": by_rank, "dp": by_rank, "rank_matches": ranks, **alone, **up_to}


def _members(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise InvalidArgument("the body is not an object with members")
    return body


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a member. One that is absent, null or empty has its default. Raises InvalidArgument if it has none."""
    value = body.get(name)
    if value in (None, "") and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name} is {value!r}, not a text")
    return value


def _number(body: Mapping[str, Any], name: str, lowest: int, highest: int) -> int:
    value = body.get(name)
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidArgument(f"{name} is {value!r}: use a whole number from {lowest} to {highest}")
    return value


def _tokens(found: Any) -> list[int]:
    """Parse a list, or 4 bytes a token, little-endian."""
    if isinstance(found, bytes) and len(found) % 4 == 0:
        return list(struct.unpack(f"<{len(found) // 4}i", found))
    if not isinstance(found, list) or not all(type(each) is int and -(1 << 31) <= each < 1 << 31 for each in found):
        raise InvalidArgument("token_ids is neither a list of 32-bit numbers nor 4 bytes a token")
    return found


def _handler(answer: Callable[[Any], dict[str, Any] | None]) -> Handler:
    """Return a handler that responds in the format of the request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        payload = await request.clone(client_max_size=MAX_BODY_BYTES).read()
        form = msgspec.msgpack if request.content_type in MSGPACK else msgspec.json
        found = await run_in_thread(lambda: answer(_decoded(payload, form.decode)))
        if found is None:
            return refusal(404, "no such service is registered")
        return web.Response(body=form.encode(found), content_type="application/json" if form is msgspec.json else MSGPACK[0])

    return handle


def _decoded(payload: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the body is neither JSON nor, with Content-Type {MSGPACK[0]}, MessagePack: {error}") from None
