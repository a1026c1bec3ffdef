"""gRPC's health of a master: what Check and List tell. Any thread may ask, and set it.

Watch is not implemented, which its specification allows for: a client that asks for it goes on without. Who watches is anybody, and the
server that gRPC has for it tells him of a change in the thread that made it, the master's own, for as long as he takes to read it.
"""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
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

    def List(self, request: health_pb2.HealthListRequest, context: grpc.ServicerContext) -> health_pb2.HealthListResponse:  # noqa: N802
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in list(self._statuses.items())}
        return health_pb2.HealthListResponse(statuses=statuses)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask for Check, again and again")
