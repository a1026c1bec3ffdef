"""A master as the console's source: what the console asks in its own thread is carried into the loop's."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvstore.console.source import MasterSeen
from kvstore.master.directory.records import TO_PEERS
from kvstore.master.roles.contents import contents
from kvstore.master.roles.node_status import node_topology
from kvstore.master.roles.standing import Role, Standing
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import CatalogUnavailable
from kvstore.rpc.reactor import Reactor


class Watched:
    """A kvstore.console.source.Source. `status` is the master's, for the loop's thread. `action_timeout_s`: for an action to be durable."""

    def __init__(
        self, reactor: Reactor, standing: Standing, status: Callable[[], pb.StatusReply], *, timeout_s: float, action_timeout_s: float
    ) -> None:
        self._reactor, self._standing, self._status = reactor, standing, status
        self._timeout_s, self._action_timeout_s = timeout_s, action_timeout_s

    def status(self) -> pb.StatusReply:
        return self._in_loop(self._status)  # type: ignore[no-any-return]

    def masters(self) -> Sequence[MasterSeen]:
        status = self.status()
        is_owner = status.role == Role.OWNER
        own = MasterSeen(status.owner.address if is_owner else "", status.name, status.role)
        return [own] if is_owner or not status.owner.name else [own, MasterSeen(status.owner.address, status.owner.name, Role.OWNER)]

    def topologies(self) -> Sequence[pb.NodeTopology]:
        members = self._in_loop(lambda: list(self._standing.answering().directory.members))
        now_ns = self._reactor.now_ns()
        return [node_topology(node, now_ns) for node in members]

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        return contents(self._in_loop, [self._standing], None, request, now_ns=self._reactor.now_ns)

    def drain(self, node: str, *, to: str, cancel: bool) -> None:
        self._wait(lambda: self._standing.leading().drain(node, "" if cancel else to or TO_PEERS))

    def forget(self, node: str) -> None:
        self._wait(lambda: self._standing.leading().forget(node))

    def pin(self, tenant: str, namespace: str, *, pinned: bool) -> int:
        return self._wait(lambda: self._standing.leading().pin_all(tenant, namespace, pinned=pinned))  # type: ignore[no-any-return]

    def remove(self, tenant: str, namespace: str) -> int:
        return self._wait(lambda: self._standing.leading().remove_all(tenant, namespace))  # type: ignore[no-any-return]

    def set_quota(self, tenant: str, limits: Mapping[str, int | None]) -> None:
        self._wait(lambda: self._standing.leading().set_quota(tenant, limits))

    def clear_quota(self, tenant: str, names: Sequence[str]) -> None:
        self._wait(lambda: self._standing.leading().clear_quota(tenant, names))

    def _in_loop(self, function: Callable[[], Any]) -> Any:
        return self._reactor.call(function, deadline_s=self._timeout_s)

    def _wait(self, begin: Callable[[], "Future[Any]"]) -> Any:
        """What comes of it, once that is durable. Raises what `begin` raises, Unavailable, CatalogUnavailable: it takes too long."""
        try:
            return self._in_loop(begin).result(self._action_timeout_s)
        except TimeoutError:
            raise CatalogUnavailable("it has begun and takes long, or the catalog takes no writes now; it goes on") from None
