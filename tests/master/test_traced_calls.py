"""Promises of traced_calls.py, through a real server: a call that names a trace has a span, whatever comes of it, and no other has."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.master.grpc_calls import TracedCalls
from kvstore.protocol.traceparent import TraceParent

PARENT = TraceParent(7, 11)
SHOWN = (("traceparent", PARENT.text()),)
TIMEOUT_S = 20.0
TOLD: list[tuple[str, TraceParent, str]] = []


class Noting:
    def __init__(self, name: str, parent: TraceParent) -> None:
        self._of = name, parent
        self.place = parent

    def begin(self, name: str) -> "Noting":
        return self

    def follow(self, name: str) -> "Noting":
        return self

    def set(self, name: str, value: int | str) -> None:
        return

    def end(self, error: str = "") -> None:
        TOLD.append((*self._of, error))


def one(request: bytes, context: grpc.ServicerContext) -> bytes:
    if request == b"refuse":
        context.abort(grpc.StatusCode.NOT_FOUND, "one secret key")
    if request == b"fail":
        raise ValueError("one secret key")
    return request


def many(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield request
    yield one(request, context)


def taken(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return b"".join(requests)


@pytest.fixture
def channel() -> Iterator[Any]:
    TOLD.clear()
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[TracedCalls(Noting)])
    methods: Any = {
        "AskOne": grpc.unary_unary_rpc_method_handler(one),
        "AskMany": grpc.unary_stream_rpc_method_handler(many),
        "Tell": grpc.stream_unary_rpc_method_handler(taken),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(0).wait(TIMEOUT_S)


def test_answers_one_and_many_have_a_span(channel: Any) -> None:
    assert channel.unary_unary("/test.Service/AskOne")(b"a", timeout=TIMEOUT_S, metadata=SHOWN) == b"a"
    assert list(channel.unary_stream("/test.Service/AskMany")(b"b", timeout=TIMEOUT_S, metadata=SHOWN)) == [b"b", b"b"]
    assert TOLD == [("ask_one", PARENT, ""), ("ask_many", PARENT, "")]


@pytest.mark.parametrize(("request_", "code"), [(b"refuse", "NOT_FOUND"), (b"fail", "UNKNOWN")])
def test_an_error_is_named_by_its_status_and_no_more(channel: Any, request_: bytes, code: str) -> None:
    with pytest.raises(grpc.RpcError):
        channel.unary_unary("/test.Service/AskOne")(request_, timeout=TIMEOUT_S, metadata=SHOWN)
    with pytest.raises(grpc.RpcError):
        list(channel.unary_stream("/test.Service/AskMany")(request_, timeout=TIMEOUT_S, metadata=SHOWN))
    assert TOLD == [("ask_one", PARENT, code), ("ask_many", PARENT, code)]


def test_without_a_trace_there_is_no_span(channel: Any) -> None:
    for metadata in ((), (("traceparent", "garbage"),)):
        assert channel.unary_unary("/test.Service/AskOne")(b"a", timeout=TIMEOUT_S, metadata=metadata) == b"a"
    assert channel.stream_unary("/test.Service/Tell")(iter([b"a", b"b"]), timeout=TIMEOUT_S, metadata=SHOWN) == b"ab"
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        channel.unary_unary("/test.Service/None")(b"a", timeout=TIMEOUT_S, metadata=SHOWN)
    assert TOLD == []
