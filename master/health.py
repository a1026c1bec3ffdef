"""gRPC's health of a master: what Check tells. Any thread may ask, and set it.

Watch is not implemented, which its specification allows for: a client that asks for it goes on without. Who watches is anybody, and the
server that gRPC has for it tells him of a change in the thread that made it, the master's own, for as long as he takes to read it. Nor is
List, which the oldest gRPC that engines pin (1.78) has no message for.
"""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class MasterHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """See the module."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}

    def set(self, service: str, *, is_serving: bool) -> None:
        """By the service's full name; "": the master as a whole."""
        self._statuses[service] = SERVING if is_serving else NOT_SERVING

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask for Check, again and again")
