"""A gRPC server in front of a real etcd that passes calls on, but lets a test hold, refuse or precede them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc

from tests.etcd_server import EtcdServer

CALL_DEADLINE_S = 60.0


class FaultyEtcd:
    """While entered, `host_port` behaves like `etcd`, except for what `on_call` does.

    `on_call(method)` (`Range`, `Txn`, `LeaseGrant`, `Watch`...) runs in a thread of the server before a call is passed on: it may
    block, or return a status with which to refuse the call instead. `on_answer(method)` runs once the real etcd has answered. `hang_up`
    ends the calls that last (`Watch`, `LeaseKeepAlive`), of which only the beginning is a call.
    """

    def __init__(self, etcd: EtcdServer) -> None:
        self.on_call: Callable[[str], grpc.StatusCode | None] = lambda method: None
        self.on_answer: Callable[[str], None] = lambda method: None
        self._upstream = grpc.insecure_channel(etcd.host_port)
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._lasting: set[Any] = set()
        self._server.add_generic_rpc_handlers((_PassOn(self),))
        self.host_port = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def pass_on(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = method.rsplit("/", 1)[1]
        refusal = self.on_call(name)
        if refusal is not None:
            context.abort(refusal, "refused by the test")
        token = tuple((key, value) for key, value in context.invocation_metadata() if key == "token")
        answer: bytes = self._upstream.unary_unary(method, None, None)(request, timeout=CALL_DEADLINE_S, metadata=token)
        self.on_answer(name)
        return answer

    def pass_on_stream(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        refusal = self.on_call(method.rsplit("/", 1)[1])
        if refusal is not None:
            context.abort(refusal, "refused by the test")
        call = self._upstream.stream_stream(method, None, None)(requests)
        context.add_callback(call.cancel)
        self._lasting.add(call)
        try:
            yield from call
        except grpc.RpcError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "ended by the test")
        finally:
            self._lasting.discard(call)

    def hang_up(self) -> None:
        for call in list(self._lasting):
            call.cancel()

    def __enter__(self) -> "FaultyEtcd":
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.stop(None).wait(CALL_DEADLINE_S)
        self._upstream.close()


class _PassOn(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, owner: FaultyEtcd) -> None:
        self._owner = owner

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if method.endswith(("/Watch", "/LeaseKeepAlive")):
            return grpc.stream_stream_rpc_method_handler(lambda requests, context: self._owner.pass_on_stream(method, requests, context))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._owner.pass_on(method, request, context))
