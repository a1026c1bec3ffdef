"""The client's side of the control plane: status, nodes and the listing of keys, by gRPC. Nothing here is on the hot path.

What is asked of a cluster whose key space has several partitions is asked of the owner of each, and put together (merging.py); what is not
by key, of partition 0's.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from kvstore.client.config import ClientSettings
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.partitions import as_metadata as of_partition
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello, Welcome
from kvstore.protocol.status_merge import merged_status
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.owners import Masters, await_owner
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.grpc_errors import translated
from kvstore.rpc.keepalive import grpc_options
from kvstore.rpc.tracing import trace_metadata
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.grpc_credentials import open_channel


class StoredKey(NamedTuple):
    key: bytes
    size_bytes: int
    namespace: str


class Control:
    """Connections to masters' control planes. A context manager; threads may share it."""

    def __init__(self, address: str, settings: ClientSettings, *others: str, are_owners: bool = False) -> None:
        """Of the master whose control plane is at `address`, for partition 0 of the key space, and of those for the `others`, in order.
        Connects at the first call. With `are_owners` the status of one that owns its partition no more is Unavailable: it knows of no
        nodes. Raises ConfigError for certificates that cannot be used."""
        self._settings = settings
        self._are_owners = are_owners
        self._shown = as_metadata(settings.tenant, settings.token)
        tls, options = Certificates.of(settings), grpc_options(settings.peer_timeout_s)
        self._addresses = (address, *others)
        self._channels = {place: open_channel(place, tls, options) for place in dict.fromkeys(self._addresses)}
        self._stubs: list[Any] = [ControlStub(self._channels[place]) for place in self._addresses]  # type: ignore[no-untyped-call]

    def _metadata(self, partition: int = 0) -> tuple[tuple[str, str | bytes], ...]:
        """Of a call that begins: who asks, what about, and the trace that it belongs to."""
        return *self._shown, *of_partition(partition), *trace_metadata()

    @classmethod
    def find(cls, settings: ClientSettings, deadline: Deadline | None = None) -> "Control":
        """Of the masters that own the catalog now; once others do, it is to be found anew. Raises as find_control."""
        first, *others = find_controls(settings, deadline or Deadline(settings.deadline_s))
        return cls(first, settings, *others, are_owners=True)

    def status(self, deadline: Deadline | None = None) -> pb.StatusReply:
        """The whole cluster, as the nodes' last heartbeats have it. `deadline`: of all that is asked; None: each question has its own."""
        return merged_status([self.status_of(partition, deadline) for partition in range(len(self._stubs))])

    def status_of(self, partition: int, deadline: Deadline | None = None) -> pb.StatusReply:
        """The cluster as the owner of one partition knows it. Raises Unavailable."""
        left_s = None if deadline is None else deadline.left_s()
        reply: pb.StatusReply = self._call("Status", pb.StatusRequest(), partition, left_s)
        if self._are_owners and reply.role == "following":
            raise Unavailable(f"another master owns partition {partition} by now, or nobody yet: try again")
        return reply

    def _call(self, method: str, request: Any, partition: int = 0, left_s: float | None = None) -> Any:
        """The reply, or the list of those that a stream brings. Raises the typed error."""
        timeout_s = self._settings.deadline_s if left_s is None else left_s
        try:
            reply = getattr(self._stubs[partition], method)(request, timeout=timeout_s, metadata=self._metadata(partition))
            return list(reply) if hasattr(reply, "__next__") else reply
        except grpc.RpcError as error:
            raise translated(error) from None

    def _of_each_owner(self, method: str, request: Any) -> list[Any]:
        """What each master that owns a partition replies, as `_call`."""
        first = {address: partition for partition, address in reversed(list(enumerate(self._addresses)))}
        return [self._call(method, request, partition) for partition in sorted(first.values())]

    def _change_node(self, method: str, node: str, request: Any) -> None:
        """Ask the owner of each partition that knows the node, that of the first one, which says whether that may be, last."""
        for partition in range(1, len(self._stubs)):
            if any(known.name == node for known in self.status_of(partition).nodes):
                self._call(method, request, partition)
        self._call(method, request)

    def topologies(self, node: str = "") -> list[pb.NodeTopology]:
        """What the nodes, or the one named, last said of their hosts. Raises InvalidArgument for a node that there is not."""
        found: list[pb.NodeTopology] = self._call("Topologies", pb.TopologiesRequest(node=node))
        return found

    def forget(self, node: str) -> None:
        """Have a dead node known no more; durable on return. Raises InvalidArgument (no such node, or it is alive), Unavailable (the
        catalog takes no writes now: it is forgotten once it does)."""
        self._change_node("Forget", node, pb.ForgetRequest(node=node))

    def drain(self, node: str, *, to: str = "peers", cancel: bool = False) -> None:
        """Have a node take no new blocks, and what only it has go `to` "peers" that have room (its NVMe for what finds none), or to its
        "nvme"; or have it take blocks again. Durable on return; how far it is says its status. Raises InvalidArgument (no such node or
        place), Unavailable (the catalog takes no writes now: it is so, but does not outlive the master yet)."""
        self._change_node("Drain", node, pb.DrainRequest(node=node, to=to, cancel=cancel))

    def set_quota(self, tenant: str, limits: Mapping[str, int | None]) -> None:
        """Give the tenant these limits, by their names in the quotas file (None: no limit), above what that file says; others stay as they
        are. Durable on return; nodes hear of it with their next heartbeat. Raises InvalidArgument, Full (too many tenants have limits set),
        Unavailable (the catalog takes no writes now: it is so, but does not outlive the
        master yet)."""
        given = {name: limit for name, limit in limits.items() if limit is not None}
        request = pb.SetQuotaRequest(tenant=tenant, limits=given, unlimited=[name for name in limits if name not in given])
        self._call("SetQuota", request)

    def clear_quota(self, tenant: str, names: Iterable[str] = ()) -> None:
        """Have these limits of the tenant, all if none is named, be as the quotas file has them; as `set_quota`."""
        self._call("ClearQuota", pb.ClearQuotaRequest(tenant=tenant, names=names))

    def audit(self, after: int = 0) -> list[pb.AuditEntry]:
        """Entries of the audit trail with a higher number than `after`, oldest first. Raises Denied, Unavailable."""
        return [entry for part in self._call("Audit", pb.AuditRequest(after=after)) for entry in part.entries]

    def sessions(self) -> list[pb.SessionStatus]:
        """Connections of clients and nodes to the masters that own a partition. Raises Denied, Unavailable."""
        return [row for parts in self._of_each_owner("Sessions", pb.SessionsRequest()) for part in parts for row in part.sessions]

    def end_session(self, id: int, master: str = "") -> None:
        """Close a connection to the master of that name, or to the only owner (""). Raises InvalidArgument: there is none of that id."""
        owners = {self.status_of(partition).name: partition for partition in reversed(range(len(self._stubs)))}
        meant = [partition for name, partition in owners.items() if master in ("", name)]
        if len(meant) != 1:
            raise InvalidArgument(f"name the master of session {id}: {', '.join(f'{id}@{name}' for name in sorted(owners))}")
        self._call("EndSession", pb.EndSessionRequest(id=id), meant[0])

    def tokens(self) -> list[pb.TokenStatus]:
        """Names, roles and ends of the tokens that the owner of partition 0 accepts. Raises Denied, Unavailable."""
        return [row for part in self._call("Tokens", pb.TokensRequest()) for row in part.tokens]

    def slow_requests(self) -> list[pb.SlowRequest]:
        """The slowest requests of the last minutes at masters and nodes, slowest first. Raises Denied, Unavailable."""
        replies = self._of_each_owner("SlowRequests", pb.SlowRequestsRequest())
        return sorted((one for reply in replies for one in reply.requests), key=lambda one: -one.duration_us)

    def report_weights(self, report: pb.WeightsReport) -> float:
        """Report what an engine uses; the seconds until its next report. Raises Denied, InvalidArgument, Full, Unavailable."""
        return float(self._call("ReportWeights", report).report_interval_s)

    def weights(self) -> pb.WeightsTable:
        """Versions of weights and the namespaces of their blocks: the tenant's, or of all tenants for operators."""
        table = pb.WeightsTable()
        for part in self._call("Weights", pb.WeightsRequest(tenant=self._settings.tenant)):
            table.MergeFrom(part)
        return table

    def retire_weights(self, base: str, version: str = "", *, tenant: str = "") -> int:
        """Have blocks of a version of weights evicted first, until an engine begins to use it; durable on return. The number of rows of the
        table. `tenant`: that of the settings if none is named. Raises InvalidArgument (no engine reported such weights), Unavailable (the
        catalog takes no writes now: it is so, but does not outlive the master yet)."""
        request = pb.RetireWeightsRequest(tenant=tenant or self._settings.tenant, base=base, version=version)
        return int(self._call("RetireWeights", request).versions)

    def keys(self, namespace: str | None = None, *, limit: int = 0, deadline: Deadline | None = None) -> Iterator[StoredKey]:
        """The tenant's keys, in no order; of one namespace, or of all (None). `limit` 0: no limit. `deadline`: as of `status`. Raises
        InvalidArgument: an operator, who has no keys, names no tenant."""
        settings = self._settings
        request = pb.ListKeysRequest(tenant=settings.tenant, namespace=namespace or "", any_namespace=namespace is None, limit=limit)
        left = limit
        try:
            for partition, stub in enumerate(self._stubs):
                left_s = settings.deadline_s if deadline is None else deadline.left_s()
                for reply in stub.ListKeys(request, timeout=left_s, metadata=self._metadata(partition)):
                    yield from map(StoredKey, reply.keys, reply.sizes, reply.namespaces)
                    left -= len(reply.keys)
                if limit and not left:
                    return
                request.limit = left if limit else 0
        except grpc.RpcError as error:
            raise translated(error) from None

    def contents(self, tenant: str = "", namespace: str = "", *, max_segments: int = 0, hottest: bool = False) -> pb.ContentsReply:
        """What the tenant (that of the settings if none is named) holds by namespace, and the `max_segments` largest segments of one
        namespace's prefixes, or those that are read most: nodes count that while it is asked for, so the first answers have few. Seconds
        where there are tens of millions of blocks."""
        settings = self._settings
        request = pb.ContentsRequest(tenant=tenant or settings.tenant, namespace=namespace, max_segments=max_segments, hottest=hottest)
        reply: pb.ContentsReply = self._call("Contents", request)
        return reply

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def cluster_status(settings: ClientSettings, deadline: Deadline | None = None) -> pb.StatusReply:
    """The whole cluster; while a partition changes hands its next owner is waited for. Raises as find_control."""
    deadline = deadline or Deadline(settings.deadline_s)
    while True:
        with Control.find(settings, deadline) as control:
            try:
                return control.status(deadline)
            except Unavailable:
                pause_s = settings.owner_retry_s
                if deadline.up_to_s(pause_s) < pause_s:
                    raise
        time.sleep(pause_s)


def find_control(settings: ClientSettings) -> str:
    """The control address of the master that owns the catalog, of partition 0. Raises InvalidArgument, and as control_of_owner."""
    return control_of_owner(known_masters(settings), settings, Deadline(settings.deadline_s))


def find_controls(settings: ClientSettings, deadline: Deadline) -> list[str]:
    """As `find_control`, of the owner of each partition, in order."""
    first = _owner_of(known_masters(settings), settings, deadline)
    others = (_owner_of(known_masters(settings, partition), settings, deadline) for partition in range(1, first.partitions))
    return [first.control, *(other.control for other in others)]


def control_of_owner(masters: Masters, settings: ClientSettings, deadline: Deadline) -> str:
    """The control address of the one of `masters` that owns their partition: waited for, where several are known, while none does. Raises
    Unavailable, Unauthorized, ProtocolError."""
    return _owner_of(masters, settings, deadline).control


def _owner_of(masters: Masters, settings: ClientSettings, deadline: Deadline) -> Welcome:
    channel = await_owner(
        masters,
        hello(settings),
        deadline,
        attempt_s=settings.connect_timeout_s,
        pause_s=settings.owner_retry_s,
        tls=Certificates.of(settings),
    )
    channel.close()
    return channel.welcome


def hello(settings: ClientSettings) -> Hello:
    return Hello(ROLE_CLIENT, settings.tenant, settings.token)


def known_masters(settings: ClientSettings, partition: int = 0) -> Masters:
    """For what the partition is asked. Raises InvalidArgument: no address, or a malformed one."""
    return Masters([parse_address(text.strip())._replace(partition=partition) for text in settings.master.split(",") if text.strip()])


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message as plain values for JSON. Unlike protobuf's own form, 64-bit numbers stay numbers; bytes are in hex."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR"):
        return as_dict(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "items"):
        return {name: _plain(value[name]) for name in sorted(value)}
    return [_plain(item) for item in value]
