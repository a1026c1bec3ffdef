"""Promises of callers.py, over real gRPC. Each method by each credential: tests/security/test_matrix.py."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.master import control_service
from kvstore.master.audit_trail import AuditTrail
from kvstore.master.callers import Callers
from kvstore.protocol import control_pb2 as pb
from kvstore.rpc.reactor import Reactor
from kvstore.security.authenticator import Guard
from kvstore.security.credentials import NO_TENANT
from kvstore.security.grpc_metadata import as_metadata
from tests.credentials import JOIN, OPERATOR, tokens_file
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread

UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    tokens = tokens_file(tmp_path, more='n1 = "one"')
    with master_in_thread(tmp_path / "run", tokens=tokens, node_ttl_s=60.0) as found:
        yield found


def refusal(call: Any, request: Any, tenant: str = "", token: str = "") -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call(request, timeout=TIMEOUT_S, metadata=as_metadata(tenant, token))
    return refused.value.code(), refused.value.details() or ""


def test_who_shows_nothing_or_something_wrong_is_told_what_a_call_needs(places: Places) -> None:
    with places.stub() as stub:
        assert refusal(stub.Drain, pb.DrainRequest()) == (
            UNAUTHENTICATED,
            "a token of [admins], or a tenant's with role admin is needed to drain a node",
        )
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n"), "", "wrong")
        assert code == UNAUTHENTICATED
        assert text.startswith(f"{NO_TENANT}; a registered node, by its join token (the setting join_token")
        assert refusal(stub.Forget, pb.ForgetRequest(), "red", "secret")[0] == PERMISSION_DENIED


def test_a_node_speaks_under_the_name_of_its_token_only(places: Places) -> None:
    with places.stub() as stub:
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n2", instance=1), "", "one")
        assert (code, text) == (PERMISSION_DENIED, "node 'n1' may not speak as node 'n2': its token is of that name only")
    NodeSide(places, "n1", token="one").close()


def test_an_operator_lists_any_tenants_keys_and_a_tenant_its_own(places: Places) -> None:
    with places.stub() as stub:
        request = pb.ListKeysRequest(tenant="red", any_namespace=True)
        for tenant, token in (("red", OPERATOR), ("", OPERATOR), ("red", "secret")):
            assert list(stub.ListKeys(request, timeout=TIMEOUT_S, metadata=as_metadata(tenant, token))) == []
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ListKeys(pb.ListKeysRequest(tenant="blue"), timeout=TIMEOUT_S, metadata=as_metadata("red", "secret")))
    assert refused.value.code() == PERMISSION_DENIED
    assert "may not list what tenant 'blue'" in (refused.value.details() or "")


def test_reflection_is_for_who_is_known(places: Places) -> None:
    with grpc.insecure_channel(places.control) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        assert list(stub.ServerReflectionInfo(iter([question]), timeout=TIMEOUT_S, metadata=as_metadata("red", "secret")))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ServerReflectionInfo(iter([question]), timeout=TIMEOUT_S))
    assert refused.value.code() == UNAUTHENTICATED


def test_a_method_without_a_rule_is_nobodys() -> None:
    served = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    callers = Callers(Guard(""), AuditTrail(Reactor(), wall_s=lambda: 0.0), threads=1, message_timeout_s=TIMEOUT_S)

    class Bare(grpc.GenericRpcHandler):  # type: ignore[type-arg]
        def service(self, handler_call_details: Any) -> Any:
            return served if handler_call_details.method.endswith("New") else None

    server = grpc.server(ThreadPoolExecutor(1), interceptors=[callers])
    server.add_generic_rpc_handlers((Bare(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
            channel: Any = opened
            code, text = refusal(channel.unary_unary("/kvstore.v1.Control/New"), b"")
            assert (code, text) == (PERMISSION_DENIED, "no rule says who may call /kvstore.v1.Control/New: nobody may")
            assert refusal(channel.unary_unary("/kvstore.v1.Control/None"), b"")[0] == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(0).wait(TIMEOUT_S)
        callers.executor.close()


RED = ("red", "secret")


class Silence:
    """The messages of calls that have none for now."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._over.wait(2 * TIMEOUT_S)
        return iter(())

    def end(self) -> None:
        self._over.set()


@contextmanager
def silent_calls(channel: Any, method: str, shown: tuple[str, str]) -> Iterator[list[Any]]:
    """Twice as many as the master has threads, with their headers and nothing more."""
    silence = Silence()
    call = channel.stream_stream(method) if method.endswith("Info") else channel.stream_unary(method).future
    calls = [call(iter_of(silence), metadata=as_metadata(*shown)) for _ in range(2 * THREADS)]
    try:
        yield calls
    finally:
        silence.end()
        for one in calls:
            one.cancel()


def iter_of(silence: Silence) -> Iterator[bytes]:
    yield from silence


THREADS = 8
SILENT = [
    pytest.param("/kvstore.v1.Control/Status", ("", ""), id="strangers"),
    pytest.param("/grpc.health.v1.Health/Check", ("", ""), id="strangers who ask for health"),
    pytest.param("/kvstore.v1.Control/Register", ("", ""), id="strangers who say that they are nodes"),
    pytest.param("/kvstore.v1.Control/Status", RED, id="a tenant"),
    pytest.param("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", RED, id="a tenant's streams"),
]


@pytest.mark.parametrize(("method", "shown"), SILENT)
def test_calls_that_say_nothing_more_keep_neither_nodes_nor_others_from_being_served(
    method: str, shown: tuple[str, str], tmp_path: Path
) -> None:
    with (
        master_in_thread(tmp_path, tokens=tokens_file(tmp_path), control_threads=THREADS, hello_timeout_s=3600.0) as places,
        grpc.insecure_channel(places.control) as channel,
        silent_calls(channel, method, shown),
        places.stub() as stub,
    ):
        for name in ("n1", "n2"):
            NodeSide(places, name, token=JOIN).close()
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("", OPERATOR)).nodes


@pytest.mark.parametrize(("method", "shown"), SILENT)
def test_calls_that_say_nothing_more_end_after_the_time_that_a_message_has(method: str, shown: tuple[str, str], tmp_path: Path) -> None:
    with (
        master_in_thread(tmp_path, tokens=tokens_file(tmp_path), control_threads=THREADS, hello_timeout_s=0.2) as places,
        grpc.insecure_channel(places.control) as channel,
        silent_calls(channel, method, shown) as calls,
    ):
        for call in calls:
            assert call.code() in (grpc.StatusCode.CANCELLED, UNAUTHENTICATED), "whoever is a stranger there is told at once"


def test_a_call_without_a_message_and_one_whose_service_fails_are_told_so(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(identity: object, reply: pb.StatusReply) -> pb.StatusReply:
        raise ValueError("a fault")

    monkeypatch.setattr(control_service, "as_seen_by", fail)
    with grpc.insecure_channel(places.control) as opened:
        channel: Any = opened
        empty = channel.stream_unary("/kvstore.v1.Control/Status")
        with pytest.raises(grpc.RpcError) as refused:
            empty(iter(()), timeout=TIMEOUT_S, metadata=as_metadata(*RED))
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "a call without a message")
    with places.stub() as stub:
        code, text = refusal(stub.Status, pb.StatusRequest(), *RED)
    assert code == grpc.StatusCode.UNKNOWN or "a fault" in text
    assert "a fault" in caplog.text
