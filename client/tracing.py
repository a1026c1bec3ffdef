"""OpenTelemetry spans of a client's calls, if its settings name a collector: `kvstore.get`, `kvstore.put_batch`, ...
They are children of the program's current span. Without tracing the methods are unwrapped and cost nothing."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.core.arguments import check_kind
from kvstore.client.core.forks import ForkGeneration
from kvstore.protocol.settings import load_settings
from kvstore.rpc.tracing import SampledCall

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.config import TracingSettings
    from kvstore.telemetry.tracing.spans import RecordedCall, Tracing

PUTS: Final = ("put", "put_batch", "put_batch_from", "replace")
GETS: Final = ("get", "get_batch", "get_into", "get_batch_into", "get_each_into", "get_ranges_into")
METADATA_CALLS: Final = ("exists", "exists_batch", "match_prefix", "locate", "remove", "pin", "unpin")
KEYLESS_CALLS: Final = ("remove_matching", "flush", "ping", "status", "keys")
CALLS: Final = (*PUTS, *GETS, *METADATA_CALLS, *KEYLESS_CALLS)
"""Traced methods of Client and AsyncClient."""


def trace_calls(client: Any, settings: "TracingSettings | None", *, name: str) -> "Tracing | None":
    """Trace the calls of a client as the settings say; None: as KVSTORE_TRACING_* and the file that KVSTORE_CONFIG
    names.

    `name` identifies the client at the collector. Raises InvalidArgument, ConfigError.
    """
    from kvstore.telemetry.tracing.config import SECTION, TracingSettings, open_tracing

    check_kind(settings, TracingSettings, "tracing")
    if settings is None:
        settings = load_settings(TracingSettings, SECTION, flags={})
    tracing = open_tracing(settings, role="client", instance=name)
    if tracing is not None:
        for method in CALLS:
            setattr(client, method, _traced(method, getattr(client, method), tracing))
    return tracing


def _traced(name: str, method: Callable[..., Any], tracing: "Tracing") -> Callable[..., Any]:
    process, samples = ForkGeneration.number, tracing.samples
    # A forked child may inherit a held lock: it traces nothing.

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if not samples() or ForkGeneration.number != process:
            return method(*args, **options)
        with tracing.begin_call(name) as recorded:
            result = method(*args, **options)
            _set_attributes(name, recorded, args, options, result)
            return result

    @functools.wraps(method)
    async def call_async(*args: Any, **options: Any) -> Any:
        if not samples() or ForkGeneration.number != process:
            return await method(*args, **options)
        with tracing.begin_call(name) as recorded:
            result = await method(*args, **options)
            _set_attributes(name, recorded, args, options, result)
            return result

    return call_async if inspect.iscoroutinefunction(method) else call


def _set_attributes(name: str, recorded: "RecordedCall", args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
    """Set counts and sizes on the span; never a key, tenant or value."""
    set_attribute = recorded.span.set_attribute
    if name not in KEYLESS_CALLS:
        keys: Any = args[0] if args else options.get("keys", options.get("key"))
        set_attribute("kvstore.keys", 1 if isinstance(keys, bytes) else len(keys))
    if name in GETS:
        found = [one for one in _each(result) if isinstance(one, bytes | int)]
        set_attribute("kvstore.hits", len(found))
        set_attribute("kvstore.bytes", sum(len(one) if isinstance(one, bytes) else one for one in found))
    elif name in PUTS:
        set_attribute("kvstore.stored", sum(one is True for one in _each(result)))
        set_attribute("kvstore.bytes", _size_bytes(args[1] if len(args) > 1 else options.get("value", options.get("values"))))
    set_attribute("kvstore.requests", recorded.call.requests)
    set_attribute("kvstore.way", transport_of(recorded.call))


def transport_of(call: SampledCall) -> str:
    """Transport of the values: the transfer engine, messages, or shared memory if neither was used."""
    if call.is_moved_by_engine:
        return "engine"
    return "frame" if call.requests else "shared memory"


def _each(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def _size_bytes(value: Any) -> int:
    """Size of a value: a buffer, or a list of buffers."""
    if isinstance(value, list | tuple):
        return sum(map(_size_bytes, value))
    for name in ("nbytes", "size_bytes"):
        size = getattr(value, name, None)
        if isinstance(size, int):
            return size
    return memoryview(value).nbytes
