"""Tests of health.py, over real gRPC."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.master.health import NOT_SERVING, SERVING, MasterHealth

TIMEOUT_S = 20.0


@pytest.fixture
def health() -> MasterHealth:
    return MasterHealth()


@pytest.fixture
def stub(health: MasterHealth) -> Iterator[health_pb2_grpc.HealthStub]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    server.stop(0).wait(TIMEOUT_S)


def test_check_tells_what_was_set_last(health: MasterHealth, stub: health_pb2_grpc.HealthStub) -> None:
    health.set("", is_serving=False)
    health.set("one", is_serving=True)
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == NOT_SERVING
    health.set("", is_serving=True)
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == SERVING
    health.set("one", is_serving=False)
    assert stub.Check(health_pb2.HealthCheckRequest(service="one"), timeout=TIMEOUT_S).status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="two"), timeout=TIMEOUT_S)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.promise("peers-vanish")
def test_nobody_watches(health: MasterHealth, stub: health_pb2_grpc.HealthStub) -> None:
    """A watcher that does not read must not block the thread that sets the status."""
    with pytest.raises(grpc.RpcError) as refused:
        next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)))
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
