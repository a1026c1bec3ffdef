"""Promises of grpc_errors.py, of calls that a real server ends."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.protocol.errors import GRPC_STATUS, KVStoreError, grpc_status
from kvstore.rpc.grpc_errors import translated
from kvstore.testing.transfer.awaited import PATIENCE_S
from tests.ports import free_ports


class Ending(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Ends each call with the status that its request names."""

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        def end(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode[request.decode()], "why" if request != b"UNIMPLEMENTED" else "")
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(end)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[Ending()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        server.stop(None)


def raised(channel: grpc.Channel, status: str) -> KVStoreError:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary("/tests.Ending/Call", None, None)(status.encode(), timeout=PATIENCE_S)
    return translated(error.value)


@pytest.mark.parametrize("status", sorted(set(GRPC_STATUS.values()) - {"INTERNAL", "UNKNOWN"}))
def test_grpc_status_translates_back_to_error_with_text(channel: grpc.Channel, status: str) -> None:
    found = raised(channel, status)
    assert (grpc_status(found), str(found)) == (status, "why")


def test_a_status_that_no_error_has_is_still_typed_and_told(channel: grpc.Channel) -> None:
    found = raised(channel, "UNIMPLEMENTED")
    assert (type(found), str(found)) == (KVStoreError, "UNIMPLEMENTED")


def test_an_error_that_tells_no_status_is_still_typed() -> None:
    assert type(translated(grpc.RpcError("odd"))) is KVStoreError


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_unreachable_port_is_named_without_grpcs_words(host: str) -> None:
    (port,) = free_ports(1)
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        assert str(raised(channel, "INTERNAL")) == f"cannot connect to {host}:{port}: Connection refused"


def test_unresolved_name_error_names_the_setting() -> None:
    with grpc.insecure_channel("nowhere.invalid:7441") as channel:
        assert str(raised(channel, "INTERNAL")).startswith(
            "cannot resolve nowhere.invalid, which a master has as `advertise`: make the name"
        )
