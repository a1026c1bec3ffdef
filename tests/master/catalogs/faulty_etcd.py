"""A gRPC server in front of a real etcd that passes calls on, but lets a test hold, refuse or precede them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc

from tests.etcd_server import EtcdServer

CALL_DEADLINE_S = 60.0


class FaultyEtcd:
    """While entered, `host_port` behaves like `etcd`, except for what `on_call` does.

    `on_call(method)` (`Range`, `Txn`, `Status`, `Authenticate`) runs in a thread of the server before a call is passed on: it may
    block, or return a status with which to refuse the call instead. `on_answer(method)` runs once the real etcd has answered.
    """

    def __init__(self, etcd: EtcdServer) -> None:
        self.on_call: Callable[[str], grpc.StatusCode | None] = lambda method: None
        self.on_answer: Callable[[str], None] = lambda method: None
        self._upstream = grpc.insecure_channel(etcd.host_port)
        self._server = grpc.server(ThreadPoolExecutor(8))
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
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._owner.pass_on(method, request, context))
