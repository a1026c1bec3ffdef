"""The client's side of the Scheduler service: where a request goes, and what an instance says of itself. By gRPC.

It moves no request and no block. An engine that has to report all the time uses reporter.py, which is a thread around this.
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
_HUNG_UP: Final = "the master, or another thread, has ended the connection"
_CHECK: Final = "Check"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Scheduler"].full_name


class InstanceRole(IntEnum):
    """What an instance does."""

    PREFILL = pb.ROLE_PREFILL
    DECODE = pb.ROLE_DECODE
    BOTH = pb.ROLE_BOTH
    """It decodes what it has prefilled, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCacheChange:
    """What has changed in the memory of an engine's own: keys of blocks, all of one length, that it has from now on, and no longer."""

    tenant: str
    base_version: int
    """The version that this is a change of; 0: an empty cache, whatever the master has."""
    version: int
    """After it. Above 0."""
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


class InstanceReportReply(NamedTuple):
    """The master's answer to a report."""

    interval_s: float
    """Until the next report is due."""
    engine_cache_version: int
    """That the master has; 0: none. Other than the last one sent: it has to begin anew, with an empty cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """What an instance says of itself. `name` is stable while it lives and differs from all others'."""

    name: str
    role: InstanceRole
    address: str
    """How requests are sent to it; the master hands it on as it is. For kvstore-router a URL."""
    node: str = ""
    """The name of the storage node that its blocks are put to, so that it has what that node has. Empty: it never has a prefix."""
    queue_s: float = 0.0
    """Prefill: seconds until it can start on something new."""
    send_backlog_bytes: int = 0
    """Bytes that its node was told to send to others and has not sent yet."""
    send_bytes_per_s: float = 0.0
    """As measured; 0: not measured yet."""
    batch: int = 0
    """Decode: sequences."""
    context_tokens: int = 0
    """Decode: tokens of KV cache of all of them together."""
    capacity_tokens: int = 0
    """Decode: tokens of KV cache that fit; 0: no limit."""
    seen_request_ids: Sequence[int] = ()
    """Requests that came in since the last report: the numbers above include them."""
    seen_after_s: float = 0.0
    """The numbers above include all requests that should have come in longer ago; 0: only those named."""
    engine_cache: EngineCacheChange | None = None
    """None: nothing has changed."""
    prefill_samples: Sequence[PrefillSample] = ()
    decode_samples: Sequence[DecodeSample] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlacement:
    """Where a request goes. Times are predictions."""

    request_id: int
    """What both instances name in `seen_request_ids` once the request has come in."""
    prefill: str
    decode: str
    prefill_address: str
    decode_address: str
    prefix_blocks: int
    """Leading blocks of the prompt that need not be computed, once the transfer is over."""
    transfer_from: str
    """The prefill instance that the last `transfer_blocks` of them are being copied from; empty: nothing is."""
    transfer_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.transfer_s + self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request goes nowhere. `value` is what was predicted and `limit` what it had to stay below, in the reason's unit."""

    reason: Reason
    value: float = 0.0
    limit: float = 0.0


class _SchedulerConnection(NamedTuple):
    """A connection to one master, and its methods."""

    channel: grpc.Channel
    stub: Any


class SchedulerClient:
    """A connection to the scheduler of the master that owns the catalog, found again when that one is gone, or hangs and another one owns
    it.

    A context manager; threads may share it. Every call ends within `deadline_s` and raises Unavailable or DeadlineExceeded when no
    master can be reached, Unauthorized for a wrong tenant or token, InvalidArgument for what is outside its range, and Closed.
    """

    def __init__(self, settings: ClientSettings) -> None:
        """Connects at the first call. Raises InvalidArgument: `settings.master` names no master, or has a malformed address."""
        self.settings = settings
        self._masters = known_masters(settings)
        self._lock = threading.Lock()
        self._link: _SchedulerConnection | None = None
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
        """Where a prompt of `input_tokens` goes, whose full blocks of `block_tokens` each have these keys, in order.

        The transfer that the placement needs has been started. `output_tokens` as predicted; 0: not known. `deadline`: instead of
        `deadline_s`. A master that hangs up within the call may count a request that never comes, until it takes it for lost.
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
        """The instance lives, and this is its state. Raises Full where there are too many, InvalidArgument also for what no message has."""
        reply: pb.ReportReply = self._call("Report", _report_request(report))
        return InstanceReportReply(reply.report_interval_s, reply.engine_cache_version)

    def leave(self, name: str, *, deadline: Deadline | None = None) -> None:
        """The instance ends: nothing more is sent to it. One that is not known is no error. `deadline`: instead of `deadline_s`."""
        self._call("Leave", pb.LeaveRequest(name=name), deadline)

    def instances(self) -> pb.InstancesReply:
        """All instances as they last reported, and what the scheduler has decided."""
        reply: pb.InstancesReply = self._call("Instances", pb.InstancesRequest())
        return reply

    def check(self) -> None:
        """A scheduler is there for this tenant and token, whatever their role: the owner of the catalog takes them, and serves by gRPC."""
        deadline = Deadline(self.settings.deadline_s)
        control_of_owner(self._masters, self.settings, deadline)  # its loop answers, which health does not tell
        self._call(_CHECK, health_pb2.HealthCheckRequest(service=_SERVICE), deadline)

    def close(self) -> None:
        """A second close is a no-op."""
        with self._lock:
            link, self._link, self._is_closed = self._link, None, True
        if link is not None:
            link.channel.close()

    def _call(self, method: str, request: Any, deadline: Deadline | None = None) -> Any:
        """Ask the master that owns the catalog; if it is gone, the one that does now: once, and until the deadline where several are
        known."""
        deadline = deadline or Deadline(self.settings.deadline_s)
        deadline.left_s()  # of a call that waited for its turn too long the master hears nothing
        waits, is_first = backoff_delays(self.settings.owner_retry_s), True
        while True:
            link = self._linked(deadline)
            try:
                reply = self._ask(_method(link, method), request, deadline, self._shown(method))
                if method == _CHECK and reply.status != health_pb2.HealthCheckResponse.SERVING:
                    raise Unavailable("the master does not own the catalog any more")
                return reply
            except Unavailable:
                pause_s = 0.0 if is_first else next(waits)
                if not is_first and (not self._masters.has_several or deadline.up_to_s(pause_s) < pause_s):
                    raise
            self._give_up(link)
            time.sleep(pause_s)
            is_first = False

    def _shown(self, method: str) -> tuple[tuple[str, bytes | str], ...]:
        """The credential that goes with a call, an engine's own where it speaks of itself; and the trace that the call belongs to."""
        settings = self.settings
        of_engine = method in ("Report", "Leave") and settings.instance_token
        shown = as_metadata("", settings.instance_token) if of_engine else as_metadata(settings.tenant, settings.token)
        return *shown, *trace_metadata()

    def _ask(self, method: Any, request: Any, deadline: Deadline, shown: tuple[tuple[str, bytes | str], ...]) -> Any:
        """One question to one master. Raises Unavailable, too, when it has not answered and another one owns the catalog."""
        try:
            if not self._masters.has_several:
                return method(request, timeout=deadline.left_s(), metadata=shown)
            call = method.future(request, timeout=deadline.left_s(), metadata=shown)
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
            raise Unavailable(_HUNG_UP) from None
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED:
                raise Unavailable(_HUNG_UP) from None
            raise translated(error) from None
        except ValueError:  # of a channel that another thread has closed in the meantime
            raise Unavailable(_HUNG_UP) from None

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

    def _linked(self, deadline: Deadline) -> _SchedulerConnection:
        """The connection, made if there is none. Of threads that look for a master at once the first to find one is followed."""
        with self._lock:
            if self._is_closed:
                raise Closed("this SchedulerClient was closed")
            if self._link is not None:
                return self._link
        place = control_of_owner(self._masters, self.settings, deadline)
        channel = open_channel(place, Certificates.of(self.settings), grpc_options(self.settings.peer_timeout_s))
        found = _SchedulerConnection(channel, SchedulerStub(channel))  # type: ignore[no-untyped-call]
        with self._lock:
            if self._link is None and not self._is_closed:
                self._link = found
                return found
        channel.close()
        return self._linked(deadline)

    def _give_up(self, link: _SchedulerConnection) -> None:
        with self._lock:
            if self._link is not link:
                return
            self._link = None
        link.channel.close()

    def __enter__(self) -> "SchedulerClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _method(link: _SchedulerConnection, name: str) -> Any:
    return getattr(health_pb2_grpc.HealthStub(link.channel) if name == _CHECK else link.stub, name)


def _report_request(report: InstanceReport) -> pb.ReportRequest:
    """Raises InvalidArgument for what protobuf does not take, whose errors are no typed ones."""
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
        raise InvalidArgument(f"instance {report.name!r} reports what no message can say: {error}") from None


def _packed(change: EngineCacheChange | None) -> pb.EngineCache | None:
    """Raises InvalidArgument: the keys are not all of one length."""
    if change is None:
        return None
    lengths = {len(key) for keys in (change.added, change.removed) for key in keys}
    if len(lengths) > 1:
        raise InvalidArgument(f"keys of an engine's cache are of one length, not of {sorted(lengths)} bytes")
    return pb.EngineCache(
        tenant=change.tenant,
        base_version=_number("base_version", change.base_version, bits=64),
        version=_number("version", change.version, bits=64),
        key_bytes=max(lengths, default=1),
        added=b"".join(change.added),
        removed=b"".join(change.removed),
    )


def _number(name: str, value: int, *, bits: int) -> int:
    """A protobuf field takes no other number, and says so by a ValueError that does not name it."""
    if not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{name} is {value}: it must be in [0, 2**{bits})")
    return value


def _finite_or_0(seconds: float) -> float:
    return 0.0 if seconds == float("inf") else seconds
