"""Every RPC and every frame of a master by every kind of credential, over real sockets: permitted or denied.

The table of permissions is written here a second time, independently: a changed rule, a new RPC or a new frame fails here
first.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import CommitBlocks, CopyResult, Digests, Heartbeat, QueryVictims, RequestCopy
from kvstore.protocol.control_pb2_grpc import ControlStub, SchedulerStub
from kvstore.protocol.errors import Denied, KVStoreError, from_code
from kvstore.protocol.master_messages import (
    CancelReservations,
    Exists,
    Lookup,
    MatchPrefix,
    Nodes,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    Reserve,
)
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Failure, Hello
from kvstore.rpc.address import connect, parse_address
from kvstore.security.grpc_metadata import MASTER_KEY, as_metadata
from kvstore.security.permissions import MASTER_FRAMES, RPCS
from tests.credentials import JOIN, OPERATOR, tokens_file
from tests.master.blocks import publish
from tests.master.running import TIMEOUT_S, Places, master_in_thread
from tests.rpc.wires import frame, read_frame

FILE: Final = """
n1 = "the token of n1"
[[tenants.green]]
token = "green reads"
role = "read"
[[tenants.green]]
token = "green writes"
[[tenants.green]]
token = "green rules"
role = "admin"
[[tenants.green]]
token = "green is late"
role = "admin"
expires = 2020-01-01
[[nodes.n2]]
token = "n2 is late"
expires = 2020-01-01
[[instances.p1]]
token = "the token of p1"
"""


class Shown(NamedTuple):
    tenant: str
    token: str


CREDENTIALS: Final[Mapping[str, Shown]] = {
    "none": Shown("", ""),
    "a tenant without a token": Shown("green", ""),
    "wrong": Shown("green", "guess"),
    "expired": Shown("green", "green is late"),
    "expired node": Shown("", "n2 is late"),
    "a reader's as another tenant": Shown("red", "green reads"),
    "an admin's as another tenant": Shown("red", "green rules"),
    "other tenant": Shown("red", "secret"),
    "reader": Shown("green", "green reads"),
    "writer": Shown("green", "green writes"),
    "tenant's admin": Shown("green", "green rules"),
    "operator": Shown("green", OPERATOR),
    "any node": Shown("", JOIN),
    "n1": Shown("", "the token of n1"),
    "p1": Shown("", "the token of p1"),
}
TENANT_ROLES: Final = {"reader", "writer", "tenant's admin"}
OPERATORS: Final = {"tenant's admin", "operator"}
NODES: Final = {"any node", "n1"}
VALID: Final = {"other tenant", *TENANT_ROLES, "operator", *NODES, "p1"}

CALLS: Final[Mapping[str, tuple[Any, set[str]]]] = {
    "/kvstore.v1.Control/Register": (pb.RegisterRequest(name="n7", instance=1), {"any node"}),
    "/kvstore.v1.Control/Status": (pb.StatusRequest(), VALID),
    "/kvstore.v1.Control/Topologies": (pb.TopologiesRequest(), OPERATORS),
    "/kvstore.v1.Control/Forget": (pb.ForgetRequest(node="nowhere"), OPERATORS),
    "/kvstore.v1.Control/Drain": (pb.DrainRequest(node="nowhere"), OPERATORS),
    "/kvstore.v1.Control/SetQuota": (pb.SetQuotaRequest(tenant="green"), OPERATORS),
    "/kvstore.v1.Control/ClearQuota": (pb.ClearQuotaRequest(tenant="green"), OPERATORS),
    "/kvstore.v1.Control/ListKeys": (pb.ListKeysRequest(tenant="green"), TENANT_ROLES | {"operator"}),
    "/kvstore.v1.Control/Contents": (pb.ContentsRequest(tenant="green"), TENANT_ROLES | {"operator"}),
    "/kvstore.v1.Control/ReportWeights": (pb.WeightsReport(tenant="green", engine="e"), TENANT_ROLES),
    "/kvstore.v1.Control/Weights": (pb.WeightsRequest(tenant="green"), TENANT_ROLES | {"operator"}),
    "/kvstore.v1.Control/RetireWeights": (pb.RetireWeightsRequest(tenant="green", base="b"), OPERATORS),
    "/kvstore.v1.Control/PinNamespace": (pb.PinNamespaceRequest(tenant="green"), OPERATORS),
    "/kvstore.v1.Control/RemoveNamespace": (pb.RemoveNamespaceRequest(tenant="green"), OPERATORS),
    "/kvstore.v1.Control/Audit": (pb.AuditRequest(), OPERATORS),
    "/kvstore.v1.Control/RecordAudit": (pb.AuditEntries(), set()),
    "/kvstore.v1.Control/Sessions": (pb.SessionsRequest(), OPERATORS),
    "/kvstore.v1.Control/EndSession": (pb.EndSessionRequest(id=1 << 60), OPERATORS),
    "/kvstore.v1.Control/Tokens": (pb.TokensRequest(), OPERATORS),
    "/kvstore.v1.Control/SlowRequests": (pb.SlowRequestsRequest(), OPERATORS),
    "/kvstore.v1.Scheduler/Report": (pb.ReportRequest(name="p1", role=pb.ROLE_BOTH), {"p1", "tenant's admin"}),
    "/kvstore.v1.Scheduler/Leave": (pb.LeaveRequest(name="p1"), {"p1", "tenant's admin"}),
    "/kvstore.v1.Scheduler/Schedule": (pb.ScheduleRequest(tenant="green", block_tokens=1, input_tokens=1), TENANT_ROLES),
    "/kvstore.v1.Scheduler/Instances": (pb.InstancesRequest(), OPERATORS),
    "/grpc.health.v1.Health/Check": (health_pb2.HealthCheckRequest(), set(CREDENTIALS)),
    "/grpc.health.v1.Health/List": (health_pb2.HealthListRequest(), set(CREDENTIALS)),
    "/grpc.health.v1.Health/Watch": (health_pb2.HealthCheckRequest(), set(CREDENTIALS)),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (reflection_pb2.ServerReflectionRequest(list_services=""), VALID),
}
"""A request, and the identities that are permitted to make it; the answer may be an error, but not one of permission.
"""

STRANGERS: Final = {method for method, (_request, who) in CALLS.items() if "none" in who}
FELLOWS: Final = {
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    *(
        f"/kvstore.v1.Control/{name}"
        for name in ("Status", "Topologies", "Forget", "Drain", "SetQuota", "ClearQuota", "Contents")
        + ("Weights", "RetireWeights", "PinNamespace", "RemoveNamespace", "RecordAudit", "SlowRequests")
    ),
}
"""RPCs that another master may call."""

READERS: Final = {"other tenant", *TENANT_ROLES}
"""Each of its own tenant's blocks: a session is of the tenant that its Hello named."""
WRITERS: Final = READERS - {"reader"}
MANAGERS: Final = WRITERS | {"operator"}
FRAMES: Final[Mapping[type[Message], tuple[Message, set[str]]]] = {
    Lookup: (Lookup([b"k"]), READERS),
    Exists: (Exists([b"k"]), READERS | {"operator"}),
    MatchPrefix: (MatchPrefix([b"k"]), READERS),
    Nodes: (Nodes(), READERS),
    Reserve: (Reserve([b"k"], [1]), WRITERS),
    CancelReservations: (CancelReservations([b"k"], [1]), WRITERS),
    Remove: (Remove([b"k"]), MANAGERS),
    RemoveMatching: (RemoveMatching("", 1, "*"), MANAGERS),
    Pin: (Pin([b"k"]), MANAGERS),
    PinFor: (PinFor([b"k"], 1), MANAGERS),
    Replicate: (Replicate([b"k"], 2), WRITERS),
    type(publish(1, [])): (publish(1, []), NODES),
    Digests: (Digests(1, 1, 0, [1], b"\1", [1], b"\2"), NODES),
    CommitBlocks: (CommitBlocks(1, "green", "ns", [b"k"], [1], [1], [b""], 0), NODES),
    CopyResult: (CopyResult(1, "green", [b"k"], [1], b"\1"), NODES),
    QueryVictims: (QueryVictims(1, "green", [b"k"]), NODES),
    RequestCopy: (RequestCopy(1, "green", 1, [b"k"]), NODES),
    Heartbeat: (Heartbeat(b""), NODES),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("matrix")
    with master_in_thread(folder / "run", tokens=tokens_file(folder, more=FILE), node_ttl_s=3600.0) as found:
        yield found


@pytest.mark.promise("authentication")
def test_there_is_a_row_for_every_rpc_and_every_frame() -> None:
    assert set(CALLS) == set(RPCS)
    assert {kind.TYPE for kind in FRAMES} | {Hello.TYPE} == set(MASTER_FRAMES)


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("method", CALLS)
def test_call_reaches_its_service_only_with_permission(places: Places, method: str) -> None:
    request, expected = CALLS[method]
    with grpc.insecure_channel(places.control) as channel:
        assert {name for name, shown in CREDENTIALS.items() if is_let_through(channel, method, request, as_metadata(*shown))} == expected


@pytest.mark.promise("observable")
def test_peer_master_may_do_what_its_console_needs_only(places: Places) -> None:
    assert places.master is not None
    key = places.master._authenticator.master_key
    with grpc.insecure_channel(places.control) as channel:
        for shown, expected in ((key, FELLOWS | STRANGERS), ("guess", STRANGERS)):
            metadata: list[tuple[str, str | bytes]] = [(MASTER_KEY, shown)]
            assert {method for method in CALLS if is_let_through(channel, method, CALLS[method][0], metadata)} == expected
            also: list[tuple[str, str | bytes]] = [*metadata, *as_metadata("green", OPERATOR)]
            assert is_let_through(channel, "/kvstore.v1.Scheduler/Instances", pb.InstancesRequest(), also) is False


def is_let_through(channel: grpc.Channel, method: str, request: Any, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
    service, name = method.split("/")[1:]
    stubs = {
        "kvstore.v1.Control": ControlStub,
        "kvstore.v1.Scheduler": SchedulerStub,
        "grpc.health.v1.Health": health_pb2_grpc.HealthStub,
        "grpc.reflection.v1alpha.ServerReflection": reflection_pb2_grpc.ServerReflectionStub,
    }
    asked = iter([request]) if name == "ServerReflectionInfo" else request
    try:
        answer: Any = getattr(stubs[service](channel), name)(asked, timeout=TIMEOUT_S, metadata=metadata)
        if hasattr(answer, "cancel"):  # a stream
            next(iter(answer), None)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    return True


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
def test_frame_reaches_master_service_only_with_permission(places: Places, kind: type[Message]) -> None:
    message, expected = FRAMES[kind]
    assert {name for name, shown in CREDENTIALS.items() if is_taken(places, message, name, shown)} == expected


def is_taken(places: Places, message: Message, name: str, shown: Shown) -> bool:
    """Said behind a Hello as a client, or by a node that is registered."""
    with closing(connect(parse_address(places.listen), timeout_s=TIMEOUT_S)) as sock:
        hello = Hello(ROLE_CLIENT, shown.tenant, shown.token)
        if name in NODES:
            with places.stub() as stub:
                node = name if name == "n1" else "n6"
                found = stub.Register(
                    pb.RegisterRequest(name=node, instance=1),
                    timeout=TIMEOUT_S,
                    metadata=as_metadata("", shown.token),
                )
            hello = Hello(ROLE_NODE, token=shown.token, name=node, epoch=found.registration_epoch)
        errors = [said(sock, hello), said(sock, message)]
    if errors[0] is not None:
        assert isinstance(errors[0], Denied)
        assert isinstance(errors[1], Denied), "who is not let in says nothing"
    return not isinstance(errors[1], Denied)


@pytest.mark.promise("authentication")
@pytest.mark.parametrize("role", [ROLE_CLIENT, ROLE_NODE])
@pytest.mark.parametrize("name", CREDENTIALS)
def test_hello_opens_a_session_for_the_matching_identity_only(places: Places, name: str, role: int) -> None:
    shown = CREDENTIALS[name]
    with closing(connect(parse_address(places.listen), timeout_s=TIMEOUT_S)) as sock:
        error = said(sock, Hello(role, shown.tenant, shown.token, "n1"))
    expected = VALID if role == ROLE_CLIENT else NODES
    assert (error is None) is (name in expected), error
    assert error is None or isinstance(error, Denied)


def said(sock: socket.socket, message: Message) -> KVStoreError | None:
    """The error that it is answered with, if any."""
    sock.sendall(frame(message))
    answer = read_frame(sock)[1]
    return from_code(answer.code, answer.text) if isinstance(answer, Failure) else None


def test_replayed_hello_does_not_displace_a_live_node(tmp_path: Path) -> None:
    """It can be for as long as it is valid, which is why there is TLS; but the node that it is of is still the one that
    it was.
    """
    shown = as_metadata("", "the token of n1")
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path, more=FILE)) as places, places.stub() as stub:
        first = stub.Register(pb.RegisterRequest(name="n1", instance=1), timeout=TIMEOUT_S, metadata=shown)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Register(pb.RegisterRequest(name="n1", instance=2), timeout=TIMEOUT_S, metadata=shown)
        assert "a live node already has the name" in (refused.value.details() or "")
        with closing(connect(parse_address(places.listen), timeout_s=TIMEOUT_S)) as sock:
            assert said(sock, Hello(ROLE_NODE, token="the token of n1", name="n1", epoch=first.registration_epoch)) is None
