"""Client of the control plane: status, nodes, listing of keys and administration, by gRPC. Not on the hot path.

With several partitions, a request about keys goes to every owner and the replies are merged (protocol/status_merge.py);
other requests go to the owner of partition 0.
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
    """A stored key with its size and namespace."""

    key: bytes
    size_bytes: int
    namespace: str


class Control:
    """Connections to the control planes of masters. A context manager; thread-safe."""

    def __init__(self, address: str, settings: ClientSettings, *others: str, are_owners: bool = False) -> None:
        """`address` is the control address of partition 0's master, `others` those of the further partitions, in order.
        Connects at the first call.

        With `are_owners`, the status of a master that lost its partition raises Unavailable. Raises ConfigError for
        unusable certificates.
        """
        self._settings = settings
        self._are_owners = are_owners
        self._credentials = as_metadata(settings.tenant, settings.token)
        tls, options = Certificates.of(settings), grpc_options(settings.peer_timeout_s)
        self._addresses = (address, *others)
        self._channels = {each: open_channel(each, tls, options) for each in dict.fromkeys(self._addresses)}
        self._stubs: list[Any] = [ControlStub(self._channels[each]) for each in self._addresses]  # type: ignore[no-untyped-call]

    def _metadata(self, partition: int = 0) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata of a call: credentials, partition and trace context."""
        return *self._credentials, *of_partition(partition), *trace_metadata()

    @classmethod
    def find(cls, settings: ClientSettings, deadline: Deadline | None = None) -> "Control":
        """Connect to the current owners; after a failover, find them again. Raises as `find_control`."""
        first, *others = find_controls(settings, deadline or Deadline(settings.deadline_s))
        return cls(first, settings, *others, are_owners=True)

    def status(self, deadline: Deadline | None = None) -> pb.StatusReply:
        """Status of the whole cluster, from the nodes' last heartbeats. `deadline` is for all requests; None: one per
        request."""
        return merged_status([self.status_of(partition, deadline) for partition in range(len(self._stubs))])

    def status_of(self, partition: int, deadline: Deadline | None = None) -> pb.StatusReply:
        """Status as the owner of one partition knows it. Raises Unavailable."""
        left_s = None if deadline is None else deadline.left_s()
        reply: pb.StatusReply = self._call("Status", pb.StatusRequest(), partition, left_s)
        if self._are_owners and reply.role == "following":
            raise Unavailable(f"this master does not own partition {partition} any more: retry, to find its new owner")
        return reply

    def _call(self, method: str, request: Any, partition: int = 0, left_s: float | None = None) -> Any:
        """The reply, or the list of a stream's replies. Raises the typed error."""
        timeout_s = self._settings.deadline_s if left_s is None else left_s
        try:
            reply = getattr(self._stubs[partition], method)(request, timeout=timeout_s, metadata=self._metadata(partition))
            return list(reply) if hasattr(reply, "__next__") else reply
        except grpc.RpcError as error:
            raise translated(error) from None

    def _of_each_owner(self, method: str, request: Any) -> list[Any]:
        """Reply of each distinct owner, as `_call`."""
        first = {address: partition for partition, address in reversed(list(enumerate(self._addresses)))}
        return [self._call(method, request, partition) for partition in sorted(first.values())]

    def _change_node(self, method: str, node: str, request: Any) -> None:
        """Send the request to the owner of each partition that knows the node; last to that of partition 0, which
        validates it."""
        for partition in range(1, len(self._stubs)):
            if any(known.name == node for known in self.status_of(partition).nodes):
                self._call(method, request, partition)
        self._call(method, request)

    def topologies(self, node: str = "") -> list[pb.NodeTopology]:
        """Host topologies last reported by the nodes, or by the one named. Raises InvalidArgument for an unknown
        node."""
        found: list[pb.NodeTopology] = self._call("Topologies", pb.TopologiesRequest(node=node))
        return found

    def forget(self, node: str) -> None:
        """Remove a dead node from the cluster; durable on return. Raises InvalidArgument (unknown node, or alive),
        Unavailable (the catalog takes no writes; the node is removed once it does)."""
        self._change_node("Forget", node, pb.ForgetRequest(node=node))

    def drain(self, node: str, *, to: str = "peers", cancel: bool = False) -> None:
        """Drain a node: it takes no new blocks, and its last replicas move `to` "peers" with free space (to its NVMe
        otherwise) or to its "nvme". `cancel` ends the drain.

        Durable on return; the node's status shows the progress. Raises InvalidArgument (unknown node or target),
        Unavailable (the catalog takes no writes: in effect, but lost with this master).
        """
        self._change_node("Drain", node, pb.DrainRequest(node=node, to=to, cancel=cancel))

    def set_quota(self, tenant: str, limits: Mapping[str, int | None]) -> None:
        """Set limits of a tenant, by their names in the quotas file (None: no limit), overriding that file; others
        stay.

        Durable on return; nodes receive them with their next heartbeat. Raises InvalidArgument, Full (too many tenants
        with limits), Unavailable (the catalog takes no writes: in effect, but lost with this master).
        """
        given = {name: limit for name, limit in limits.items() if limit is not None}
        request = pb.SetQuotaRequest(tenant=tenant, limits=given, unlimited=[name for name in limits if name not in given])
        self._call("SetQuota", request)

    def clear_quota(self, tenant: str, names: Iterable[str] = ()) -> None:
        """Reset these limits of the tenant, or all, to the quotas file; as `set_quota`."""
        self._call("ClearQuota", pb.ClearQuotaRequest(tenant=tenant, names=names))

    def audit(self, after: int = 0) -> list[pb.AuditEntry]:
        """Entries of the audit trail numbered above `after`, oldest first. Raises Denied, Unavailable."""
        return [entry for part in self._call("Audit", pb.AuditRequest(after=after)) for entry in part.entries]

    def sessions(self) -> list[pb.SessionStatus]:
        """Connections of clients and nodes to the owners of partitions. Raises Denied, Unavailable."""
        return [row for parts in self._of_each_owner("Sessions", pb.SessionsRequest()) for part in parts for row in part.sessions]

    def end_session(self, id: int, master: str = "") -> None:
        """Close a session of the named master, or of the only owner (""). Raises InvalidArgument for an unknown id."""
        owners = {self.status_of(partition).name: partition for partition in reversed(range(len(self._stubs)))}
        meant = [partition for name, partition in owners.items() if master in ("", name)]
        if len(meant) != 1:
            raise InvalidArgument(f"session {id} needs its master: name one of {', '.join(f'{id}@{name}' for name in sorted(owners))}")
        self._call("EndSession", pb.EndSessionRequest(id=id), meant[0])

    def tokens(self) -> list[pb.TokenStatus]:
        """Names, roles and expiry of the tokens that the owner of partition 0 accepts. Raises Denied, Unavailable."""
        return [row for part in self._call("Tokens", pb.TokensRequest()) for row in part.tokens]

    def slow_requests(self) -> list[pb.SlowRequest]:
        """Slowest requests of the last minutes at masters and nodes, slowest first. Raises Denied, Unavailable."""
        replies = self._of_each_owner("SlowRequests", pb.SlowRequestsRequest())
        return sorted((one for reply in replies for one in reply.requests), key=lambda one: -one.duration_us)

    def report_weights(self, report: pb.WeightsReport) -> float:
        """Report the weights that an engine uses: seconds until its next report. Raises Denied, InvalidArgument, Full,
        Unavailable."""
        return float(self._call("ReportWeights", report).report_interval_s)

    def weights(self) -> pb.WeightsTable:
        """Versions of weights with the namespaces of their blocks: the tenant's, or all for operators."""
        table = pb.WeightsTable()
        for part in self._call("Weights", pb.WeightsRequest(tenant=self._settings.tenant)):
            table.MergeFrom(part)
        return table

    def retire_weights(self, base: str, version: str = "", *, tenant: str = "") -> int:
        """Evict blocks of a version of weights first, until an engine uses it again; durable on return. Returns the
        number of table rows.

        `tenant` defaults to that of the settings. Raises InvalidArgument (unknown weights), Unavailable (the catalog
        takes no writes: in effect, but lost with this master).
        """
        request = pb.RetireWeightsRequest(tenant=tenant or self._settings.tenant, base=base, version=version)
        return int(self._call("RetireWeights", request).versions)

    def keys(self, namespace: str | None = None, *, limit: int = 0, deadline: Deadline | None = None) -> Iterator[StoredKey]:
        """The tenant's keys, unordered, of one namespace or of all (None). `limit` 0: no limit. `deadline` as in
        `status`.

        Raises InvalidArgument if an operator, who has no keys, names no tenant.
        """
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
        """Contents of a tenant (default: that of the settings) by namespace, and the `max_segments` largest segments of
        one namespace's prefix tree.

        With `hottest`, the most frequently read ones: nodes count reads while this is requested, so the first replies
        show few. Takes seconds with tens of millions of blocks.
        """
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
    """Status of the whole cluster; waits for the next owner during a failover. Raises as `find_control`."""
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
    """Control address of the owner of partition 0. Raises InvalidArgument, and as `control_of_owner`."""
    return control_of_owner(known_masters(settings), settings, Deadline(settings.deadline_s))


def find_controls(settings: ClientSettings, deadline: Deadline) -> list[str]:
    """Control address of the owner of each partition, in order."""
    first = _owner_of(known_masters(settings), settings, deadline)
    others = (_owner_of(known_masters(settings, partition), settings, deadline) for partition in range(1, first.partitions))
    return [first.control, *(other.control for other in others)]


def control_of_owner(masters: Masters, settings: ClientSettings, deadline: Deadline) -> str:
    """Control address of the owner among `masters`, awaited if several are known. Raises Unavailable, Unauthorized,
    ProtocolError."""
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
    """The configured masters, for one partition. Raises InvalidArgument: no address, or a malformed one."""
    return Masters([parse_address(text.strip())._replace(partition=partition) for text in settings.master.split(",") if text.strip()])


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message as plain values for JSON. Unlike protobuf's own mapping, 64-bit numbers stay numbers and bytes
    are hex. An absent optional number is None."""

    def is_absent(field: Any) -> bool:
        return field.has_presence and field.message_type is None and not message.HasField(field.name)

    return {field.name: None if is_absent(field) else _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


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
