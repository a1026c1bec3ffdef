"""Calls of the control plane that belong to a trace: a span each, asked for by whom the call's metadata names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import Span, parent_in
from kvstore.telemetry.metrics.requests import in_words


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
