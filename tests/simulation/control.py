"""The control plane without gRPC: calls of the real stubs' names reach the real service over the simulated network.

A call is a message there and one back; where the network is cut, each waits until it is healed or the call's time is over. The service
runs in a thread of its process.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import grpc

from kvstore.rpc.address import Address, parse_address
from tests.simulation.network import Network
from tests.simulation.world import Process, S, Thread

METHODS: Final = ("Register", "Status", "Drain", "Forget")
RESEND_NS: Final = 200_000_000


class CallFailed(grpc.RpcError):
    """Error of a gRPC call."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text


class _Context:
    """grpc.ServicerContext, as far as the service uses it."""

    def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        raise CallFailed(code, text)

    def is_active(self) -> bool:
        return True

    def __init__(self, metadata: Sequence[Any]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[Any]:
        return self._metadata

    def auth_context(self) -> dict[str, object]:
        return {}


class Call:
    """One call under way, and the future of who waits for it."""

    def __init__(self, plane: "ControlPlane", address: Address, name: str, request: Any, timeout_s: float, metadata: Sequence[Any]) -> None:
        self._world = plane.network.world
        self._plane = plane
        self._process = self._world.here
        self._answer: tuple[bool, Any] | None = None
        self._waiting: list[tuple[Thread, int]] = []
        self._deadline_ns = self._world.now_ns + int(timeout_s * S)
        self._there = address.host
        served = plane.services.get((address.host, address.port))
        here = self._process.host.name
        if served is None or not served[0].is_alive:
            self._later(lambda: self._end(False, CallFailed(grpc.StatusCode.UNAVAILABLE, f"{address}: connection refused")))
        else:
            process, service = served
            self._carry(here, self._there, process, lambda: self._serve(process, service, name, request, metadata))
        self._process.at(self._deadline_ns, self._expire)

    def result(self, timeout: float | None = None) -> Any:
        if self._answer is None:
            self._world.block(None if timeout is None else int(timeout * S), lambda *waiting: self._waiting.append(waiting))
        if self._answer is None:
            raise TimeoutError
        is_done, value = self._answer
        if not is_done:
            raise value
        return value

    def cancel(self) -> bool:
        return self._answer is None

    def done(self) -> bool:
        return self._answer is not None

    def _serve(self, process: Process, service: Any, name: str, request: Any, metadata: Sequence[Any]) -> None:
        def run() -> None:
            try:
                answer = True, getattr(service, name)(request, _Context(metadata))
            except CallFailed as failure:
                answer = False, failure
            self._carry(self._there, self._process.host.name, self._process, lambda: self._end(*answer))

        process.spawn(run, name)

    def _carry(self, source: str, target: str, process: Process, arrived: Callable[[], None]) -> None:
        """Deliver a message; over a cut link, retry until the call is over."""
        if not self._plane.network._is_cut(source, target):
            process.at(self._world.now_ns + self._plane.network._delay_ns(source, target), arrived)
        elif self._world.now_ns < self._deadline_ns:
            self._world.after(RESEND_NS, lambda: self._carry(source, target, process, arrived))

    def _later(self, call: Callable[[], None]) -> None:
        self._process.at(self._world.now_ns + self._plane.network._delay_ns(self._there, self._process.host.name), call)

    def _expire(self) -> None:
        if self._answer is None:
            self._end(False, CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"{self._there} does not answer"))

    def _end(self, is_done: bool, value: Any) -> None:
        if self._answer is None:
            self._answer = is_done, value
            for thread, token in self._waiting:
                thread.wake(token, True)


class _Method:
    def __init__(self, plane: "ControlPlane", address: Address, name: str) -> None:
        self._plane, self._address, self._name = plane, address, name

    def __call__(self, request: Any, **options: Any) -> Any:
        return self.future(request, **options).result()

    def future(self, request: Any, *, timeout: float = 5.0, metadata: Sequence[Any] = (), **_options: Any) -> Call:
        return Call(self._plane, self._address, self._name, request, timeout, metadata)


class _Channel:
    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> "_Channel":
        return self

    def __exit__(self, *_raised: object) -> None:
        return

    def close(self) -> None:
        return


class _Server:
    """kvstore.master.control_service.ControlServer."""

    def __init__(
        self, plane: "ControlPlane", service: Any, _scheduler: object, _callers: object, address: Address, _settings: object
    ) -> None:
        self.port = address.port
        self._plane, self._place, self._served = plane, (address.host, address.port), (plane.network.world.here, service)

    def start(self) -> None:
        self._plane.services[self._place] = self._served

    def serving(self, *, is_owner: bool) -> None:
        return

    def ready(self, *, is_ready: bool) -> None:
        return

    def expire(self) -> None:
        return

    def stop(self, grace_s: float) -> None:
        self._plane.services.pop(self._place, None)


class ControlPlane:
    """The services that listen, and what modules find as `grpc` and as stubs."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.services: dict[tuple[str, int], tuple[Process, Any]] = {}
        self.grpc = SimpleNamespace(
            RpcError=grpc.RpcError,
            Call=CallFailed,
            StatusCode=grpc.StatusCode,
        )

    def open_channel(self, place: str, tls: object, options: object) -> "_Channel":
        """kvstore.security.tls.grpc_credentials.open_channel."""
        return _Channel(place)

    def stub(self, channel: _Channel) -> SimpleNamespace:
        """kvstore.protocol.control_pb2_grpc.ControlStub."""
        address = parse_address(channel.place)
        return SimpleNamespace(**{name: _Method(self, address, name) for name in METHODS})

    def server(self, *args: Any, **options: Any) -> _Server:
        return _Server(self, *args, **options)
