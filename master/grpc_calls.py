"""Helpers of the gRPC services: run a call in the loop, and end it with a typed error."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import grpc

from kvstore.protocol.errors import KVStoreError, grpc_status
from kvstore.rpc.reactor import Reactor

T = TypeVar("T")


def in_loop(reactor: Reactor, context: grpc.ServicerContext, function: Callable[[], T], *, timeout_s: float) -> T:
    """Return the result of `function`, run in the loop's thread. Aborts the call with its typed error."""
    try:
        return reactor.call(function, deadline_s=timeout_s)
    except KVStoreError as error:
        abort(context, error)


def abort(context: grpc.ServicerContext, error: KVStoreError) -> NoReturn:
    """End the call with the status of the error's branch."""
    context.abort(grpc.StatusCode[grpc_status(error)], str(error))
    raise AssertionError("abort raises")
