"""Tests of grpc_calls.py, through a real server whose loop is stopped, or answers with errors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import grpc
import pytest

from kvstore.master.grpc_calls import in_loop
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import SchedulerServicer, SchedulerStub, add_SchedulerServicer_to_server
from kvstore.protocol.errors import Full
from kvstore.rpc.reactor import Reactor

TIMEOUT_S = 20.0


class Service(SchedulerServicer):
    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:  # noqa: N802
        return in_loop(self._reactor, context, pb.LeaveReply if request.name else _no_room, timeout_s=0.05 if request.name else TIMEOUT_S)


def _no_room() -> NoReturn:
    raise Full("no room")


def test_in_loop_returns_results_errors_and_timeouts() -> None:
    reactor, server = Reactor(), grpc.server(ThreadPoolExecutor(2))
    add_SchedulerServicer_to_server(Service(reactor), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    thread = threading.Thread(target=reactor.run)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = SchedulerStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as late:
                stub.Leave(pb.LeaveRequest(name="x"), timeout=TIMEOUT_S)
            thread.start()
            with pytest.raises(grpc.RpcError) as full:
                stub.Leave(pb.LeaveRequest(), timeout=TIMEOUT_S)
    finally:
        server.stop(0).wait(TIMEOUT_S)
        reactor.stop()
        thread.join()
        reactor.close()
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert (full.value.code(), full.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
