"""Client of the Scheduler service, by gRPC: placement of requests, and reports of engine instances.

It moves no requests and no blocks. Engines that report continuously use reporter.py, a thread around this client.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client.config import ClientSettings
from kvstore.client.control import control_of_owner, hello, known_masters
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import SchedulerStub
from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError, Unavailable
from kvstore.rpc.client.owners import backoff_delays, find_owner, probe_delays
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.grpc_errors import translated
from kvstore.rpc.keepalive import grpc_options
from kvstore.rpc.tracing import trace_metadata
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from kvstore.scheduler.request import Reason, Slo
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.grpc_credentials import open_channel

NO_SLO: Final = Slo()
_CONNECTION_ENDED: Final = "the master, or another thread, closed the connection"
_CHECK: Final = "Check"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name


class InstanceRole(IntEnum):
    """Role of an instance."""

    PREFILL = pb.ROLE_PREFILL
    DECODE = pb.ROLE_DECODE
    BOTH = pb.ROLE_BOTH
    """Decodes what it has prefilled, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCacheChange:
    """Change of an engine's own cache: keys of blocks added and removed, all of one length."""

    tenant: str
    base_version: int
    """Version that the change applies to; 0: an empty cache, regardless of the master's version."""
    version: int
    """Version after the change, above 0."""
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


class InstanceReportReply(NamedTuple):
    """The master's reply to a report."""

    interval_s: float
    """Time until the next report."""
    engine_cache_version: int
    """Version that the master has; 0: none. If it is not the last one sent, the instance restarts from an empty
    cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """Report of an instance. `name` is unique, and stable for its life."""

    name: str
    role: InstanceRole
    address: str
    """Address for requests, passed on unchanged by the master; a URL for kvstore-router."""
    node: str = ""
    """Name of the storage node that its blocks are put to, which determines its prefixes. Empty: it never has a
    prefix."""
    queue_s: float = 0.0
    """Prefill: seconds until it can start a new request."""
    send_backlog_bytes: int = 0
    """Bytes that its node has queued for other nodes."""
    send_bytes_per_s: float = 0.0
    """Measured rate; 0: unknown."""
    batch: int = 0
    """Decode: running sequences."""
    context_tokens: int = 0
    """Decode: tokens of KV cache of these sequences."""
    capacity_tokens: int = 0
    """Decode: capacity in tokens of KV cache; 0: unlimited."""
    seen_request_ids: Sequence[int] = ()
    """Requests received since the last report, which the numbers above include."""
    seen_after_s: float = 0.0
    """The numbers above include all requests due longer ago than this; 0: only those named."""
    engine_cache: EngineCacheChange | None = None
    """None: unchanged."""
    prefill_samples: Sequence[PrefillSample] = ()
    decode_samples: Sequence[DecodeSample] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlacement:
    """Placement of a request. Times are predictions."""

    request_id: int
    """Id that both instances report in `seen_request_ids` after receiving the request."""
    prefill: str
    decode: str
    prefill_address: str
    decode_address: str
    prefix_blocks: int
    """Leading blocks of the prompt that need no computation after the transfer."""
    transfer_from: str
    """Prefill instance that the last `transfer_blocks` of them are copied from; empty: no transfer."""
    transfer_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.transfer_s + self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection of a request: the predicted `value` and the `limit` that it exceeds, in the reason's unit."""

    reason: Reason
    value: float = 0.0
    limit: float = 0.0


class _SchedulerConnection(NamedTuple):
    """Connection to one master, with its methods."""

    channel: grpc.Channel
    stub: Any


class SchedulerClient:
    """Client of the scheduler at the master that owns the catalog; follows a failover. A context manager; thread-safe.

    Every call ends within `deadline_s`. It raises Unavailable or DeadlineExceeded when no master can be reached,
    Unauthorized for a wrong tenant or token, InvalidArgument for values out of range, and Closed.
    """

    def __init__(self, settings: ClientSettings) -> None:
        """Connects at the first call. Raises InvalidArgument: `settings.master` is empty or malformed."""
        self.settings = settings
        self._masters = known_masters(settings)
        self._lock = threading.Lock()
        self._connection: _SchedulerConnection | None = None
        self._is_closed = False

    def schedule(
        self,
        keys: Sequence[bytes],
        *,
        block_tokens: int,
        input_tokens: int,
        output_tokens: int = 0,
        slo: Slo = NO_SLO,
        deadline: Deadline | None = None,
    ) -> RequestPlacement | Refusal:
        """Place a prompt of `input_tokens`, with the keys of its full blocks of `block_tokens` each, in order.

        The transfer of the placement has been started. `output_tokens` is predicted; 0: unknown. `deadline` replaces
        `deadline_s`. If the connection breaks during the call, the master may count a request that never comes, until
        it expires.
        """
        request = pb.ScheduleRequest(
            tenant=self.settings.tenant,
            keys=keys,
            block_tokens=_number("block_tokens", block_tokens, bits=32),
            input_tokens=_number("input_tokens", input_tokens, bits=32),
            output_tokens=_number("output_tokens", output_tokens, bits=32),
            ttft_slo_s=_finite_or_0(slo.ttft_s),
            tbt_slo_s=_finite_or_0(slo.tbt_s),
        )
        reply: pb.ScheduleReply = self._call("Schedule", request, deadline)
        if reply.rejected:
            return Refusal(Reason(reply.rejected), reply.rejected_value, reply.rejected_limit)
        return RequestPlacement(**{field.name: getattr(reply, field.name) for field in fields(RequestPlacement)})

    def report(self, report: InstanceReport) -> InstanceReportReply:
        """Report an instance. Raises Full with too many instances, InvalidArgument for values that do not fit the
        message."""
        reply: pb.ReportReply = self._call("Report", _report_request(report))
        return InstanceReportReply(reply.report_interval_s, reply.engine_cache_version)

    def leave(self, name: str, *, deadline: Deadline | None = None) -> None:
        """Remove an instance; unknown names are ignored. `deadline` replaces `deadline_s`."""
        self._call("Leave", pb.LeaveRequest(name=name), deadline)

    def instances(self) -> pb.InstancesReply:
        """All instances as last reported, with the scheduler's counters."""
        reply: pb.InstancesReply = self._call("Instances", pb.InstancesRequest())
        return reply

    def check(self) -> None:
        """Check that a scheduler is available for this tenant and token: the owner of the catalog accepts them, and
        serves gRPC."""
        deadline = Deadline(self.settings.deadline_s)
        control_of_owner(self._masters, self.settings, deadline)  # checks the master's loop, which the health service does not
        self._call(_CHECK, health_pb2.HealthCheckRequest(service=_SERVICE), deadline)

    def close(self) -> None:
        """A second close is a no-op."""
        with self._lock:
            connection, self._connection, self._is_closed = self._connection, None, True
        if connection is not None:
            connection.channel.close()

    def _call(self, method: str, request: Any, deadline: Deadline | None = None) -> Any:
        """Call the owner of the catalog; after a failure its successor: once, or until the deadline with several
        masters."""
        deadline = deadline or Deadline(self.settings.deadline_s)
        deadline.left_s()  # raises if the call waited too long for its turn
        waits, is_first = backoff_delays(self.settings.owner_retry_s), True
        while True:
            connection = self._connect(deadline)
            try:
                reply = self._request(_method(connection, method), request, deadline, self._credentials(method))
                if method == _CHECK and reply.status != health_pb2.HealthCheckResponse.SERVING:
                    raise Unavailable("the master does not own the catalog any more")
                return reply
            except Unavailable:
                pause_s = 0.0 if is_first else next(waits)
                if not is_first and (not self._masters.has_several or deadline.up_to_s(pause_s) < pause_s):
                    raise
            self._drop_connection(connection)
            time.sleep(pause_s)
            is_first = False

    def _credentials(self, method: str) -> tuple[tuple[str, bytes | str], ...]:
        """Metadata of a call: its credential, the engine's own for reports, and the trace context."""
        settings = self.settings
        of_engine = method in ("Report", "Leave") and settings.instance_token
        credentials = as_metadata("", settings.instance_token) if of_engine else as_metadata(settings.tenant, settings.token)
        return *credentials, *trace_metadata()

    def _request(self, method: Any, request: Any, deadline: Deadline, credentials: tuple[tuple[str, bytes | str], ...]) -> Any:
        """One request to one master. Raises Unavailable also if it does not reply while another master owns the
        catalog."""
        try:
            if not self._masters.has_several:
                return method(request, timeout=deadline.left_s(), metadata=credentials)
            call = method.future(request, timeout=deadline.left_s(), metadata=credentials)
            try:
                for wait_s in probe_delays(self.settings.owner_patience_s):
                    with contextlib.suppress(grpc.FutureTimeoutError):
                        return call.result(timeout=wait_s)
                    if self._has_other_owner(deadline):
                        break
                raise Unavailable("another master owns the catalog now")
            finally:
                call.cancel()
        except grpc.FutureCancelledError:
            raise Unavailable(_CONNECTION_ENDED) from None
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED:
                raise Unavailable(_CONNECTION_ENDED) from None
            raise translated(error) from None
        except ValueError:  # another thread has closed the channel
            raise Unavailable(_CONNECTION_ENDED) from None

    def _has_other_owner(self, deadline: Deadline) -> bool:
        masters, settings = self._masters, self.settings
        try:
            find_owner(
                masters,
                hello(settings),
                deadline,
                attempt_s=settings.owner_patience_s,
                besides=masters.owner,
                tls=Certificates.of(settings),
            ).close()
        except KVStoreError:
            return False
        return True

    def _connect(self, deadline: Deadline) -> _SchedulerConnection:
        """The connection, opened if needed. If threads race, the first one wins."""
        with self._lock:
            if self._is_closed:
                raise Closed("this SchedulerClient was closed")
            if self._connection is not None:
                return self._connection
        address = control_of_owner(self._masters, self.settings, deadline)
        channel = open_channel(address, Certificates.of(self.settings), grpc_options(self.settings.peer_timeout_s))
        found = _SchedulerConnection(channel, SchedulerStub(channel))  # type: ignore[no-untyped-call]
        with self._lock:
            if self._connection is None and not self._is_closed:
                self._connection = found
                return found
        channel.close()
        return self._connect(deadline)

    def _drop_connection(self, connection: _SchedulerConnection) -> None:
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
        connection.channel.close()

    def __enter__(self) -> "SchedulerClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _method(connection: _SchedulerConnection, name: str) -> Any:
    return getattr(health_pb2_grpc.HealthStub(connection.channel) if name == _CHECK else connection.stub, name)


def _report_request(report: InstanceReport) -> pb.ReportRequest:
    """Raises InvalidArgument for values that protobuf rejects."""
    try:
        return pb.ReportRequest(
            name=report.name,
            role=pb.Role.Name(report.role),
            address=report.address,
            node=report.node,
            queue_s=report.queue_s,
            send_backlog_bytes=_number("send_backlog_bytes", report.send_backlog_bytes, bits=64),
            send_bytes_per_s=report.send_bytes_per_s,
            batch=_number("batch", report.batch, bits=32),
            context_tokens=_number("context_tokens", report.context_tokens, bits=64),
            capacity_tokens=_number("capacity_tokens", report.capacity_tokens, bits=64),
            seen_request_ids=report.seen_request_ids,
            seen_after_s=report.seen_after_s,
            engine_cache=_packed(report.engine_cache),
            prefill_samples=[
                pb.PrefillSample(input_tokens=each.input_tokens, prefix_tokens=each.prefix_tokens, duration_s=each.duration_s)
                for each in report.prefill_samples
            ],
            decode_samples=[
                pb.DecodeSample(batch=each.batch, context_tokens=each.context_tokens, duration_s=each.duration_s)
                for each in report.decode_samples
            ],
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the report of instance {report.name!r} does not fit the message: {error}") from None


def _packed(change: EngineCacheChange | None) -> pb.EngineCache | None:
    """Raises InvalidArgument if keys differ in length."""
    if change is None:
        return None
    lengths = {len(key) for keys in (change.added, change.removed) for key in keys}
    if len(lengths) > 1:
        raise InvalidArgument(f"keys of an engine's cache must have one length, not {sorted(lengths)} bytes")
    return pb.EngineCache(
        tenant=change.tenant,
        base_version=_number("base_version", change.base_version, bits=64),
        version=_number("version", change.version, bits=64),
        key_bytes=max(lengths, default=1),
        added=b"".join(change.added),
        removed=b"".join(change.removed),
    )


def _number(name: str, value: int, *, bits: int) -> int:
    """Check the range of a protobuf field; protobuf's own ValueError does not name the field."""
    if not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{name} is {value}: it must be in [0, 2**{bits})")
    return value


def _finite_or_0(seconds: float) -> float:
    return 0.0 if seconds == float("inf") else seconds
