"""Promises of callers.py, over real gRPC. Each method by each credential: tests/security/test_matrix.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.master.callers import Callers
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.frames import VERSION
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.guard import Guard
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
        assert refusal(stub.Drain, pb.DrainRequest()) == (UNAUTHENTICATED, "Drain needs a token of [admins], or a tenant's with role admin")
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n"), "", "wrong")
        assert code == UNAUTHENTICATED
        assert text.startswith("unknown tenant '' or wrong token; Register needs a registered node, by its join token")
        assert refusal(stub.Forget, pb.ForgetRequest(), "red", "secret")[0] == PERMISSION_DENIED


def test_a_request_without_metadata_is_looked_at_for_the_token_of_its_fields(places: Places) -> None:
    with places.stub() as stub:
        assert list(stub.ListKeys(pb.ListKeysRequest(tenant="red", token="secret"), timeout=TIMEOUT_S)) == []
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ListKeys(pb.ListKeysRequest(tenant="red", token="wrong"), timeout=TIMEOUT_S))
    assert refused.value.code() == UNAUTHENTICATED


def test_a_node_speaks_under_the_name_of_its_token_only(places: Places) -> None:
    with places.stub() as stub:
        code, text = refusal(stub.Register, pb.RegisterRequest(name="n2", instance=1, protocol_version=VERSION), "", "one")
        assert (code, text) == (PERMISSION_DENIED, "node 'n1' may not speak as node 'n2': its token is of that name only")
        other = stub.Register(
            pb.RegisterRequest(name="n2", instance=1, protocol_version=VERSION), timeout=TIMEOUT_S, metadata=as_metadata("", JOIN)
        )
        beat = pb.HeartbeatRequest(node_id=other.node_id, registration_epoch=other.registration_epoch)
        assert refusal(stub.Heartbeat, beat, "", "one")[0] == PERMISSION_DENIED
        stub.Heartbeat(beat, timeout=TIMEOUT_S, metadata=as_metadata("", JOIN))
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

    class Context:
        code: grpc.StatusCode | None = None

        def abort(self, code: grpc.StatusCode, text: str) -> None:
            raise PermissionError(code.name, text)

    class Call:
        method = "/kvstore.v1.Control/New"

    callers: Any = Callers(Guard(""))
    handler = callers.intercept_service(lambda details: served, Call())
    with pytest.raises(PermissionError, match=r"no rule says who may call /kvstore\.v1\.Control/New: nobody may"):
        handler.unary_unary(pb.StatusRequest(), Context())
    assert callers.intercept_service(lambda details: None, Call()) is None, "one that there is not is gRPC's to refuse"
