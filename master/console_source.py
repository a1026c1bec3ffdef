"""Console data source and actions at a master, for the whole cluster.

Partitions that this master owns are read in its loop, from the console's threads. Other partitions are requested
from their owners, in parallel and each with a deadline. The operator is authenticated by this master alone; other
masters trust it."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.console.source import ClusterSnapshot, MasterView
from kvstore.master.control_service import CONSOLE_ACTION_TIMEOUT_S, CONTINUES
from kvstore.master.directory.records import TO_PEERS
from kvstore.master.leadership.contents_messages import contents
from kvstore.master.leadership.leader import LeaderRole
from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.leadership.status_messages import node_topology
from kvstore.master.peer_masters import PeerMasters
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.server.partition_router import refusal
from kvstore.master.status import MasterStatus
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import CatalogUnavailable, KVStoreError, NoOwner, Unavailable
from kvstore.protocol.status_merge import merged_status
from kvstore.rpc.deadline import Deadline
from kvstore.security.actor import Actor

T = TypeVar("T")
LOOK_S: Final = 2.0
"""Timeout of each peer master's status."""
REST_S: Final = 10.0
"""Interval of polls without a viewer, where other masters own partitions or several exist: otherwise all masters
would request each partition's status each second."""
ELECTION_POLL_S: Final = 0.1
"""Poll interval while an action waits for a partition's next owner."""


@dataclass(frozen=True, slots=True)
class Action:
    """A change requested by operator `by`: `begin` runs at the partition's owner if that is this master; else
    `method` is called there."""

    begin: Callable[[LeaderRole], "Future[Any]"]
    method: str
    request: Any
    by: Actor


class MasterConsoleSource:
    """Implements kvstore.console.source.ConsoleSource. Called by the console's threads."""

    def __init__(self, master: MasterParts, status: MasterStatus, peer_masters: PeerMasters, *, address: str) -> None:
        """`address` is this master's frames address."""
        self._reactor, self._status, self._peer_masters, self._address = master.reactor, status, peer_masters, address
        self._role_managers = [partition.role_manager for partition in status.partitions]
        self._timeout_s = master.settings.control_timeout_s
        self._action_timeout_s = CONSOLE_ACTION_TIMEOUT_S
        """For an action to be durable, and for another master's contents."""
        self._last_status: dict[int, tuple[float, pb.StatusReply]] = {}
        """Last status of partitions that others own, and its time."""
        self._silent: dict[str, str] = {}
        """Errors of owners at the last poll, by address."""
        self._asks_others = False

    def rest_s(self) -> float:
        """Interval of the ClusterWatcher's polls without a viewer."""
        return REST_S if self._asks_others or len(self._role_managers) > 1 else 0.0

    def snapshot(self) -> ClusterSnapshot:
        own, own_s = self._own(), time.monotonic()
        asked = self._begin({number: reply.owner.address for number, reply in enumerate(own) if _is_of_another(reply)})
        self._asks_others = bool(asked)
        replies, silent = [], dict[str, str]()
        for number, reply in enumerate(own):
            if reply.role != MasterRole.FOLLOWING:
                self._last_status.pop(number, None)
                replies.append(reply)
                continue
            try:
                replies.append(self._checked_reply(number, asked[number]) if number in asked else self._last_known(number, reply))
            except KVStoreError as error:
                silent[reply.owner.address] = str(error)
                replies.append(self._last_known(number, reply))
        self._silent = silent
        status_s = [self._last_status[number][0] if number in self._last_status else own_s for number in range(len(own))]
        now_s = time.monotonic()
        found = merged_status(replies)
        for node in found.nodes:  # they are partition 0's
            node.heartbeat_age_s += now_s - status_s[0]
        owners = list(own[0].owners)  # as this master knows them: others may not have seen the change yet
        del found.owners[:]
        found.owners.extend(owners)
        return ClusterSnapshot(found, tuple(self._missing(own, address, why) for address, why in silent.items()), now_s - min(status_s))

    def masters(self) -> Sequence[MasterView]:
        own = self._own()
        role = MasterRole.OWNER if any(reply.role == MasterRole.OWNER for reply in own) else own[0].role
        records = [
            self._last_status[number][1].records if number in self._last_status else reply.records for number, reply in enumerate(own)
        ]
        behind = max(0, sum(records) - sum(reply.records for reply in own)) if role == MasterRole.FOLLOWING else 0
        owners = {reply.owner.address: reply.owner.name for reply in own if _is_of_another(reply)}
        seen = [MasterView(self._address, own[0].name, role, behind)]
        seen += [MasterView(address, name, MasterRole.OWNER, 0, self._silent.get(address, "")) for address, name in sorted(owners.items())]
        others = {address: peer_master.name for address, peer_master in sorted(self._peer_masters.known().items()) if address not in owners}
        asked = {address: self._begin(dict.fromkeys(range(len(own)), address)) for address in others}
        return [*seen, *(self._follower(address, name, asked[address], sum(records)) for address, name in others.items())]

    def topologies(self) -> Sequence[pb.NodeTopology]:
        owner = self._owner_elsewhere(0)
        if owner:
            told: list[pb.NodeTopology] = self._peer_masters.call(owner, "Topologies", pb.TopologiesRequest(), timeout_s=self._timeout_s)
            return told
        members = self._in_loop(lambda: list(self._role_managers[0].readable_leader().directory.members))
        now_ns = self._reactor.now_ns()
        return [node_topology(node, now_ns) for node in members]

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        owner = self._owner_elsewhere(0)
        if owner:
            reply: pb.ContentsReply = self._peer_masters.call(owner, "Contents", request, timeout_s=self._action_timeout_s)
            return reply
        return contents(self._in_loop, self._role_managers, None, request, now_ns=self._reactor.now_ns)

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        return self._in_loop(lambda: self._role_managers[0].audit().after(after))  # type: ignore[no-any-return]

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        owner = self._owner_elsewhere(0)
        if owner:
            reply: pb.SlowRequestsReply = self._peer_masters.call(
                owner, "SlowRequests", pb.SlowRequestsRequest(), timeout_s=self._timeout_s
            )
            return reply.requests
        return self._in_loop(self._status.slow_requests)  # type: ignore[no-any-return]

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        place = "" if cancel else to or TO_PEERS
        request = pb.DrainRequest(node=node, to=to, cancel=cancel)
        self._of_node(node, Action(lambda leader: leader.drain(node, place, by), "Drain", request, by))

    def forget(self, node: str, by: Actor) -> None:
        self._of_node(node, Action(lambda leader: leader.forget(node, by), "Forget", pb.ForgetRequest(node=node), by))

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        request = pb.PinNamespaceRequest(tenant=tenant, namespace=namespace, pinned=pinned)
        return self._of_blocks(Action(lambda leader: leader.pin_all(tenant, namespace, by, pinned=pinned), "PinNamespace", request, by))

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        request = pb.RemoveNamespaceRequest(tenant=tenant, namespace=namespace)
        return self._of_blocks(Action(lambda leader: leader.remove_all(tenant, namespace, by), "RemoveNamespace", request, by))

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        given = {name: limit for name, limit in limits.items() if limit is not None}
        request = pb.SetQuotaRequest(tenant=tenant, limits=given, unlimited=[name for name in limits if name not in given])
        self._do(0, Action(lambda leader: leader.set_quota(tenant, limits, by), "SetQuota", request, by))

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        request = pb.ClearQuotaRequest(tenant=tenant, names=names)
        self._do(0, Action(lambda leader: leader.clear_quota(tenant, names, by), "ClearQuota", request, by))

    # --- what others know ---

    def _own(self) -> list[pb.StatusReply]:
        """Status of each partition as this master has it; one call into the loop each."""
        return [self._in_loop(partial(self._status.of, partition)) for partition in self._status.partitions]

    def _begin(self, owners: Mapping[int, str]) -> dict[int, Callable[[], pb.StatusReply]]:
        """Request the status of partitions from the masters at these addresses, in parallel."""

        def begin(number: int, address: str) -> Callable[[], pb.StatusReply]:
            try:
                return self._peer_masters.begin(address, "Status", pb.StatusRequest(), partition=number, timeout_s=LOOK_S)
            except KVStoreError as error:
                return partial(_fail, error)

        return {number: begin(number, address) for number, address in owners.items()}

    def _checked_reply(self, number: int, answer: Callable[[], pb.StatusReply]) -> pb.StatusReply:
        """Return an owner's status. Raises KVStoreError if it does not respond or is no longer the owner."""
        found = answer()
        if found.role == MasterRole.FOLLOWING:
            raise refusal(None)
        self._last_status[number] = time.monotonic(), found
        return found

    def _last_known(self, number: int, own: pb.StatusReply) -> pb.StatusReply:
        """Return the last status of a partition whose owner does not respond, with its current owner."""
        if number not in self._last_status:
            return own
        found = pb.StatusReply()
        found.CopyFrom(self._last_status[number][1])
        found.role = own.role
        found.owner.CopyFrom(own.owner)
        return found

    def _missing(self, own: Sequence[pb.StatusReply], address: str, why: str) -> str:
        mine = [number for number, reply in enumerate(own) if reply.owner.address == address]
        what = "the catalog" if len(own) == 1 else f"{len(mine)} of the {len(own)} partitions"
        ages = [time.monotonic() - self._last_status[number][0] for number in mine if number in self._last_status]
        shown = f"its data shown are {max(ages):.0f} s old" if len(ages) == len(mine) else "not all is shown"
        return f"{own[mine[0]].owner.name} at {address}, which owns {what}, does not answer: {why}; {shown}"

    def _follower(self, address: str, name: str, asked: Mapping[int, Callable[[], pb.StatusReply]], records: int) -> MasterView:
        try:
            known = sum(answer().records for answer in asked.values())
        except KVStoreError as error:
            return MasterView(address, name, error=str(error))
        return MasterView(address, name, MasterRole.FOLLOWING, max(0, records - known))

    # --- what owners do ---

    def _owner_elsewhere(self, number: int) -> str:
        """Return the address of the partition's owner, "" for this master. Raises NoOwner."""

        def look() -> str:
            role_manager = self._role_managers[number]
            if role_manager.role is not MasterRole.FOLLOWING:
                return ""
            if role_manager.owner is None:
                raise refusal(None)
            return role_manager.owner.address

        found: str = self._in_loop(look)
        return found

    def _at_owner(self, number: int, call: Callable[[str, Deadline], T]) -> T:
        """Call the partition's owner: `call` gets its address, "" for this master. During a change of owner, retry
        at the next one until the deadline."""
        deadline = Deadline(self._action_timeout_s)
        while True:
            owner = self._await_owner(number, deadline)
            try:
                return call(owner, deadline)
            except Unavailable:
                time.sleep(deadline.up_to_s(ELECTION_POLL_S))  # the former owner may be deposed before this master sees it
                if not deadline.up_to_s(1.0) or not self._is_no_longer(number, owner):
                    raise

    def _await_owner(self, number: int, deadline: Deadline) -> str:
        """As `_owner_elsewhere`, but wait for an election. Raises NoOwner at the deadline."""
        while True:
            try:
                return self._owner_elsewhere(number)
            except NoOwner:
                pause_s = deadline.up_to_s(ELECTION_POLL_S)
                if not pause_s:
                    raise
                time.sleep(pause_s)

    def _is_no_longer(self, number: int, owner: str) -> bool:
        """Return True if the partition has another owner, or none."""
        try:
            return self._owner_elsewhere(number) != owner
        except NoOwner:
            return True

    def _do(self, number: int, action: Action) -> Any:
        """Run the action at the partition's owner; return its result once it is durable."""

        def do(owner: str, deadline: Deadline) -> Any:
            if owner:
                return self._peer_masters.call(
                    owner, action.method, action.request, partition=number, timeout_s=deadline.left_s(), actor=action.by
                )
            return self._wait(lambda: action.begin(self._role_managers[number].leader()), deadline)

        return self._at_owner(number, do)

    def _of_blocks(self, action: Action) -> int:
        """Run the action in all partitions; return the number of blocks."""
        done = [self._do(number, action) for number in range(len(self._role_managers))]
        return sum(one if isinstance(one, int) else one.blocks for one in done)

    def _of_node(self, node: str, action: Action) -> None:
        """Run the action at the owner of each partition that knows the node; last at partition 0's, which may refuse
        it."""
        for number in range(1, len(self._role_managers)):
            if self._knows(number, node):
                self._do(number, action)
        self._do(0, action)

    def _knows(self, number: int, node: str) -> bool:
        def look(owner: str, deadline: Deadline) -> bool:
            if owner:
                timeout_s = deadline.up_to_s(self._timeout_s)
                reply = self._peer_masters.call(owner, "Status", pb.StatusRequest(), partition=number, timeout_s=timeout_s)
            else:
                reply = self._in_loop(partial(self._status.of, self._status.partitions[number]))
            if reply.role == MasterRole.FOLLOWING:  # a follower has no nodes
                raise refusal(None)
            return any(known.name == node for known in reply.nodes)

        return self._at_owner(number, look)

    def _in_loop(self, function: Callable[[], Any]) -> Any:
        return self._reactor.call(function, deadline_s=self._timeout_s)

    def _wait(self, begin: Callable[[], "Future[Any]"], deadline: Deadline) -> Any:
        """Return the action's result once durable. Raises its error, Unavailable, or CatalogUnavailable at the
        deadline."""
        try:
            return self._in_loop(begin).result(deadline.left_s())
        except TimeoutError:
            raise CatalogUnavailable(CONTINUES) from None


def _is_of_another(reply: pb.StatusReply) -> bool:
    return reply.role == MasterRole.FOLLOWING and bool(reply.owner.name)


def _fail(error: KVStoreError) -> pb.StatusReply:
    raise error
