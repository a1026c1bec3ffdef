"""gRPC service kvstore.v1.Scheduler: reports of instances and scheduling of requests.

gRPC's threads hold no state: they check and unpack a call, run it in the loop's thread, and return its result or
typed error."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import grpc

from kvstore.master.callers import Callers
from kvstore.master.config import MasterSettings
from kvstore.master.grpc_calls import abort, in_loop
from kvstore.master.scheduling.scheduler import ClusterScheduler, ScheduledPrompt
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import SchedulerServicer
from kvstore.protocol.errors import Denied, KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.scheduler.request import Slo
from kvstore.security.identity import IdentityKind

T = TypeVar("T")

NO_PROMISE: Final = float("inf")

log = logging.getLogger("kvstore.master")


class SchedulerService(SchedulerServicer):
    """Implements kvstore.v1.Scheduler. `scheduling` returns the owner's scheduler, in the loop's thread, or raises
    Unavailable."""

    def __init__(self, reactor: Reactor, settings: MasterSettings, scheduling: Callable[[], ClusterScheduler], callers: Callers) -> None:
        self._reactor = reactor
        self._settings = settings
        self._scheduling = scheduling
        self._callers = callers

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:  # noqa: N802
        def report() -> int:
            self._check_name(context, request)
            scheduling = self._scheduling()
            is_new = scheduling.instances.get(request.name) is None
            other = scheduling.report(request, self._reactor.now_ns())
            if is_new:
                log.info("instance %s (%s) has joined, at %s", request.name, pb.Role.Name(request.role), request.address)
            if other:
                log.warning(
                    "two engines have the name %s, at %s and at %s: each replaces the other; give them different names",
                    request.name,
                    other,
                    request.address,
                )
            return scheduling.engine_caches.version(request.name)

        version = self._in_loop(context, report)
        return pb.ReportReply(report_interval_s=self._settings.report_interval_s, engine_cache_version=version)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:  # noqa: N802
        def leave() -> None:
            self._check_name(context, request)
            self._scheduling().leave(request.name)

        self._in_loop(context, leave)
        return pb.LeaveReply()

    def Schedule(self, request: pb.ScheduleRequest, context: grpc.ServicerContext) -> pb.ScheduleReply:  # noqa: N802
        try:
            identity = self._callers.identify(context)
            if not identity.is_tenant(request.tenant):
                raise Denied(f"{identity} may not schedule requests of tenant {request.tenant!r}: use a token of that tenant")
            prompt = _prompt(request)
        except KVStoreError as error:
            abort(context, error)
        return self._in_loop(context, lambda: self._scheduling().schedule(prompt, self._reactor.now_ns()))

    def Instances(self, request: pb.InstancesRequest, context: grpc.ServicerContext) -> pb.InstancesReply:  # noqa: N802
        return self._in_loop(context, lambda: self._scheduling().show(self._reactor.now_ns()))

    def _check_name(self, context: grpc.ServicerContext, request: "pb.ReportRequest | pb.LeaveRequest") -> None:
        """Raises Denied unless this identity may act as the instance of this name."""
        identity = self._callers.identify(context)
        if identity.kind is IdentityKind.INSTANCE and not identity.may_use_name(request.name):
            raise Denied(f"{identity} may not report as instance {request.name!r}: use a token with that instance's name")

    def _in_loop(self, context: grpc.ServicerContext, function: Callable[[], T]) -> T:
        return in_loop(self._reactor, context, function, timeout_s=self._settings.control_timeout_s)


def _prompt(request: pb.ScheduleRequest) -> ScheduledPrompt:
    """Raises InvalidArgument."""
    return ScheduledPrompt(
        tenant=request.tenant,
        keys=list(request.keys),
        block_tokens=request.block_tokens,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        slo=Slo(request.ttft_slo_s or NO_PROMISE, request.tbt_slo_s or NO_PROMISE),
    )
