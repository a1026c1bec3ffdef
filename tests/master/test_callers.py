"""Tests of callers.py, over real gRPC. Each method by each credential: tests/security/test_matrix.py."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.master import callers as module
from kvstore.master import control_service
from kvstore.master.audit_trail import AuditTrail
from kvstore.master.callers import Callers
from kvstore.master.config import MasterSettings
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.reactor import Reactor
from kvstore.security.authenticator import Authenticator
from kvstore.security.credentials import NO_TENANT
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.permissions import OPEN
from kvstore.telemetry.metrics.histogram import Histograms
from kvstore.testing.transfer.awaited import eventually
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


def test_missing_or_wrong_credential_error_names_the_need(places: Places) -> None:
    with places.stub() as stub:
        assert refusal(stub.Drain, pb.DrainRequest()) == (
            UNAUTHENTICATED,
            "a token of [admins], or a tenant's with role admin is needed to drain a node",
        )
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n"), "", "wrong")
        assert code == UNAUTHENTICATED
        assert text.startswith(f"{NO_TENANT}; a registered node, by its join token (the setting join_token")
        assert refusal(stub.Forget, pb.ForgetRequest(), "red", "secret")[0] == PERMISSION_DENIED


@pytest.mark.promise("authentication")
def test_a_node_speaks_under_the_name_of_its_token_only(places: Places) -> None:
    with places.stub() as stub:
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n2", instance=1), "", "one")
        assert (code, text) == (PERMISSION_DENIED, "node 'n1' may not register as node 'n2': use a token with that node's name")
    NodeSide(places, "n1", token="one").close()


def test_an_operator_lists_any_tenants_keys_and_a_tenant_its_own(places: Places) -> None:
    with places.stub() as stub:
        request = pb.ListKeysRequest(tenant="red", any_namespace=True)
        for tenant, token in (("red", OPERATOR), ("", OPERATOR), ("red", "secret")):
            assert list(stub.ListKeys(request, timeout=TIMEOUT_S, metadata=as_metadata(tenant, token))) == []
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ListKeys(pb.ListKeysRequest(tenant="blue"), timeout=TIMEOUT_S, metadata=as_metadata("red", "secret")))
    assert refused.value.code() == PERMISSION_DENIED
    assert "may not list the blocks of tenant 'blue'" in (refused.value.details() or "")


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
    with served_by({"New": served}) as channel:
        code, text = refusal(channel.unary_unary("/test.Service/New"), b"")
        assert (code, text) == (PERMISSION_DENIED, "/test.Service/New has no permission rule: the call is refused")
        assert refusal(channel.unary_unary("/test.Service/None"), b"")[0] == grpc.StatusCode.UNIMPLEMENTED


@contextmanager
def served_by(methods: dict[str, Any], begin_span: Any = None) -> Iterator[Any]:
    """A channel to a server with these methods, whose calls pass through Callers."""
    trail = AuditTrail(Reactor(), wall_s=lambda: 0.0)
    callers = Callers(Authenticator(""), trail, MasterSettings(control_threads=1), durations=Histograms(), begin_span=begin_span)
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[callers])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        server.stop(0).wait(TIMEOUT_S)
        callers.executor.close()


class Noted:
    """A span that notes its end."""

    def __init__(self, ended: list[tuple[str, TraceParent, str]], name: str, parent: TraceParent) -> None:
        self._ended, self._of = ended, (name, parent)

    def end(self, error: str = "") -> None:
        self._ended.append((*self._of, error))


def _one(request: bytes, context: grpc.ServicerContext) -> bytes:
    if request == b"refuse":
        context.abort(grpc.StatusCode.NOT_FOUND, "one secret key")
    if request == b"fail":
        raise ValueError("one secret key")
    return request


def _many(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield request
    yield _one(request, context)


def test_traced_call_has_a_span_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RPCS", {"/test.Service/AskOne": OPEN, "/test.Service/AskMany": OPEN})
    parent, ended = TraceParent(7, 11), list[tuple[str, TraceParent, str]]()
    methods = {"AskOne": grpc.unary_unary_rpc_method_handler(_one), "AskMany": grpc.unary_stream_rpc_method_handler(_many)}
    with served_by(methods, partial(Noted, ended)) as channel:
        one, many = channel.unary_unary("/test.Service/AskOne"), channel.unary_stream("/test.Service/AskMany")
        for shown in ((), (("traceparent", "garbage"),)):
            assert one(b"a", timeout=TIMEOUT_S, metadata=shown) == b"a"
        assert ended == []
        shown = (("traceparent", parent.text()),)
        for request, code in ((b"a", ""), (b"refuse", "NOT_FOUND"), (b"fail", "UNKNOWN")):
            for call in (one, lambda *args, **named: list(many(*args, **named))):
                with contextlib.suppress(grpc.RpcError):
                    call(request, timeout=TIMEOUT_S, metadata=shown)
            eventually(lambda: len(ended) == 2, "both have ended")
            assert ended == [("ask_one", parent, code), ("ask_many", parent, code)]
            ended.clear()


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


@pytest.mark.promise("peers-vanish")
@pytest.mark.parametrize(("method", "shown"), SILENT)
def test_stalled_calls_leave_threads_for_others(method: str, shown: tuple[str, str], tmp_path: Path) -> None:
    with (
        master_in_thread(tmp_path, tokens=tokens_file(tmp_path), control_threads=THREADS, hello_timeout_s=3600.0) as places,
        grpc.insecure_channel(places.control) as channel,
        silent_calls(channel, method, shown),
        places.stub() as stub,
    ):
        for name in ("n1", "n2"):
            NodeSide(places, name, token=JOIN).close()
        assert stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=as_metadata("", OPERATOR)).nodes


@pytest.mark.promise("peers-vanish")
@pytest.mark.parametrize(("method", "shown"), SILENT)
def test_stalled_calls_end_at_the_message_timeout(method: str, shown: tuple[str, str], tmp_path: Path) -> None:
    with (
        master_in_thread(tmp_path, tokens=tokens_file(tmp_path), control_threads=THREADS, hello_timeout_s=0.2) as places,
        grpc.insecure_channel(places.control) as channel,
        silent_calls(channel, method, shown) as calls,
    ):
        for call in calls:
            assert call.code() in (grpc.StatusCode.CANCELLED, UNAUTHENTICATED), "whoever is a stranger there is told at once"


def test_empty_call_and_failed_service_get_a_status(
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
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no request message")
    with places.stub() as stub:
        code, text = refusal(stub.Status, pb.StatusRequest(), *RED)
    assert code == grpc.StatusCode.UNKNOWN or "a fault" in text
    assert "a fault" in caplog.text
