"""Control planes of masters that say what a test has them say."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server


class StubControl(ControlServicer):
    """`status` is what it answers to Status. At `place`."""

    def __init__(self, status: pb.StatusReply) -> None:
        self.says_status: Callable[[], pb.StatusReply] = lambda: status
        self.drained: list[str] = []
        self.place = ""

    def Status(self, _request: pb.StatusRequest, _context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        return self.says_status()

    def Drain(self, request: pb.DrainRequest, _context: grpc.ServicerContext) -> pb.DrainReply:  # noqa: N802
        self.drained.append(request.node)
        return pb.DrainReply()


@contextmanager
def stub_controls(*statuses: pb.StatusReply) -> Iterator[list[StubControl]]:
    """One for each, until the end."""
    controls, servers = [StubControl(status) for status in statuses], []
    try:
        for control in controls:
            servers.append(grpc.server(ThreadPoolExecutor(1)))
            add_ControlServicer_to_server(control, servers[-1])  # type: ignore[no-untyped-call]
            control.place = f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}"
            servers[-1].start()
        yield controls
    finally:
        for server in servers:
            server.stop(None)
