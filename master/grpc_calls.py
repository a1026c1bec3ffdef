"""gRPC calls of the control plane: carried into the loop, timed and traced. It knows no service."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc

from kvstore.protocol.errors import KVStoreError, grpc_status
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.tracing import Span, parent_in
from kvstore.telemetry.metrics.histogram import Histograms
from kvstore.telemetry.metrics.requests import in_words

T = TypeVar("T")


def in_loop(reactor: Reactor, context: grpc.ServicerContext, function: Callable[[], T], *, timeout_s: float) -> T:
    """The result of `function`, run in the loop's thread. Ends the call with its typed error."""
    try:
        return reactor.call(function, deadline_s=timeout_s)
    except KVStoreError as error:
        abort(context, error)


class TimedCalls(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Tells how long each call took that has one answer, by its method: `register`, `heartbeat`."""

    def __init__(self, durations: Histograms) -> None:
        self._durations = durations

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        name = in_words(details.method.rpartition("/")[2])

        def timed(request: Any, context: grpc.ServicerContext) -> Any:
            began_ns = time.monotonic_ns()
            try:
                return handler.unary_unary(request, context)
            finally:
                self._durations[name].record(time.monotonic_ns() - began_ns)

        return grpc.unary_unary_rpc_method_handler(timed, handler.request_deserializer, handler.response_serializer)


def abort(context: grpc.ServicerContext, error: KVStoreError) -> NoReturn:
    """End the call with the status of the error's branch."""
    context.abort(grpc.StatusCode[grpc_status(error)], str(error))
    raise AssertionError("abort raises")


class TracedCalls(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Behind whoever says who may call: strangers begin no spans. `begin` makes the span of a method, for any thread."""

    def __init__(self, begin: Callable[[str, TraceParent], Span]) -> None:
        self._begin = begin

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler, parent = continuation(details), parent_in(details.invocation_metadata)
        if handler is None or parent is None or handler.request_streaming:
            return handler
        name, serve = in_words(details.method.rpartition("/")[2]), handler.unary_unary or handler.unary_stream

        @contextmanager
        def traced(context: Any) -> Iterator[None]:
            span = self._begin(name, parent)
            try:
                yield
            except BaseException:
                code = context.code()
                span.end(code.name if code is not None else "UNKNOWN")
                raise
            span.end()

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            with traced(context):
                return serve(request, context)

        def answers(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with traced(context):
                yield from serve(request, context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answers, handler.request_deserializer, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)
