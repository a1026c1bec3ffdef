"""A client's calls as spans of OpenTelemetry, where its settings name a collector: `kvstore.get`, `kvstore.put_batch`, ... by the methods'
names, parts of the program's own span where one is under way. A client that traces nothing has its methods as they are, and pays nothing.
"""

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
QUESTIONS: Final = ("exists", "exists_batch", "match_prefix", "locate", "remove", "pin", "unpin")
OF_NO_KEY: Final = ("remove_matching", "flush", "ping", "status", "keys")
CALLS: Final = (*PUTS, *GETS, *QUESTIONS, *OF_NO_KEY)
"""Of Client and AsyncClient: what is traced."""


def trace_calls(client: Any, settings: "TracingSettings | None", *, name: str) -> "Tracing | None":
    """Have the calls of a Client or AsyncClient traced as the settings say; None: as KVSTORE_TRACING_* and the file that KVSTORE_CONFIG
    names do. `name` tells it from others at the collector. Raises InvalidArgument, ConfigError."""
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
    # In a forked child a lock that another thread held at the fork stays held: there nothing is traced.

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if not samples() or ForkGeneration.number != process:
            return method(*args, **options)
        with tracing.begin_call(name) as recorded:
            result = method(*args, **options)
            _tell(name, recorded, args, options, result)
            return result

    @functools.wraps(method)
    async def call_async(*args: Any, **options: Any) -> Any:
        if not samples() or ForkGeneration.number != process:
            return await method(*args, **options)
        with tracing.begin_call(name) as recorded:
            result = await method(*args, **options)
            _tell(name, recorded, args, options, result)
            return result

    return call_async if inspect.iscoroutinefunction(method) else call


def _tell(name: str, recorded: "RecordedCall", args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
    """How many and how much, never which: no key, tenant or value is told."""
    told = recorded.span.set_attribute
    if name not in OF_NO_KEY:
        keys: Any = args[0] if args else options.get("keys", options.get("key"))
        told("kvstore.keys", 1 if isinstance(keys, bytes) else len(keys))
    if name in GETS:
        found = [one for one in _each(result) if isinstance(one, bytes | int)]
        told("kvstore.hits", len(found))
        told("kvstore.bytes", sum(len(one) if isinstance(one, bytes) else one for one in found))
    elif name in PUTS:
        told("kvstore.stored", sum(one is True for one in _each(result)))
        told("kvstore.bytes", _size_bytes(args[1] if len(args) > 1 else options.get("value", options.get("values"))))
    told("kvstore.requests", recorded.call.requests)
    told("kvstore.way", way_of(recorded.call))


def way_of(call: SampledCall) -> str:
    """How the values went: over the transfer engine, else by messages to daemons; with neither, through shared memory."""
    if call.is_moved_by_engine:
        return "engine"
    return "frame" if call.requests else "shared memory"


def _each(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def _size_bytes(value: Any) -> int:
    """Of what is put: a buffer, or a list of such."""
    if isinstance(value, list | tuple):
        return sum(map(_size_bytes, value))
    for name in ("nbytes", "size_bytes"):
        size = getattr(value, name, None)
        if isinstance(size, int):
            return size
    return memoryview(value).nbytes
