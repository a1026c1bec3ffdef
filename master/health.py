"""gRPC health service of a master: implements Check.

Watch is not implemented, as its specification allows; clients fall back to Check. gRPC's own implementation sends a
change in the thread that makes it, the master's, for as long as an unauthenticated peer takes to read. List is
missing, too: the oldest gRPC that engines pin (1.78) has no message for it."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class MasterHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Status of each service. Thread-safe."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}

    def set(self, service: str, *, is_serving: bool) -> None:
        """Set the status of a service by its full name; "" for the master as a whole."""
        self._statuses[service] = SERVING if is_serving else NOT_SERVING

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not implemented: poll Check")
