"""Master whose control plane is fuzzed: in this process, over real gRPC, without authentication, so that every handler
is reached.
"""

import atexit
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.master.config import MasterSettings
from kvstore.master.master import Master
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub

TIMEOUT_S: Final = 30.0

FAULTS: Final = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""No answer: the handler raised what is no typed error, or hangs."""
METHODS: Final = tuple(
    (f"/{service.full_name}/{method.name}", getattr(pb, method.input_type.name), method.server_streaming)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
STATUS: Final = [method for method, _kind, _streams in METHODS].index("/kvstore.v1.Control/Status")
MAX_NODES: Final = 4
"""Else each input that registers one would leave it."""
_KEPT: Final = ExitStack()
NODE: Final = pb.RegisterRequest(name="n1", instance=1)
"""It is there: what is asked about a node comes further than to the question which one."""


def parsed(data: bytes) -> tuple[str, Message, bool] | None:
    """The call that the bytes are: the first one chooses the method, the others are its request.

    None: no request, which gRPC refuses.
    """
    if not data:
        return None
    method, kind, streams = METHODS[data[0] % len(METHODS)]
    try:
        return method, kind.FromString(data[1:]), streams
    except DecodeError:
        return None


def call(data: bytes) -> grpc.StatusCode:
    """The status with which the master ends it; INVALID_ARGUMENT for what is no request.

    Raises AssertionError for one of FAULTS.
    """
    asked = parsed(data)
    if asked is None:
        return grpc.StatusCode.INVALID_ARGUMENT
    method, request, streams = asked
    channel = _master()
    stub: Any = channel.unary_stream if streams else channel.unary_unary
    ask = stub(method, request_serializer=lambda message: message.SerializeToString(), response_deserializer=None)
    try:
        answer = ask(request, timeout=TIMEOUT_S)
        for _ in answer if streams else ():
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code in FAULTS:
            raise AssertionError(f"{method} ends with {code.name}: {error.details()}") from None
        if code is grpc.StatusCode.UNAVAILABLE:  # a valid response, unless the master is dead
            call(bytes([STATUS]))
        return code
    return grpc.StatusCode.OK


@cache
def _master() -> grpc.Channel:
    """A channel to it, where NODE is registered. It ends with the process, whose fuzzer says when, or with `close`."""
    folder = _KEPT.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-fuzz-"))
    here = MasterSettings(listen="127.0.0.1:0", control="127.0.0.1:0", run_dir=folder, http="")
    master = Master(replace(here, slow_start_s=0.0, max_nodes=MAX_NODES, node_ttl_s=3600.0))
    _KEPT.callback(master.close)
    control = master.start().control
    loop = threading.Thread(target=master.reactor.run, daemon=True)  # others are waited for before anybody could stop it
    loop.start()
    _KEPT.callback(loop.join)
    _KEPT.callback(master.reactor.stop)
    channel = _KEPT.enter_context(grpc.insecure_channel(control))
    atexit.register(close)
    ControlStub(channel).Register(NODE, timeout=TIMEOUT_S)  # type: ignore[no-untyped-call]
    return channel


def close() -> None:
    """Stop the master. The next call starts another."""
    _KEPT.close()
    _master.cache_clear()
