"""A master as the console's source: of the whole cluster, whichever partitions it owns.

What it owns is asked for in its loop, into which the console's threads carry it; the rest of the masters that own it, at once and each with
a deadline. Who lets an operator in is the master whose page he looks at: the others do as that master says.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.console.source import ClusterSnapshot, MasterView
from kvstore.master.control_service import CONSOLE_ACTION_TIMEOUT_S, IT_GOES_ON
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
"""For each fellow to answer: one that does not is no reason to wait long."""
REST_S: Final = 10.0
"""Between two looks at a cluster of which others own a part, or of several partitions, while nobody wants to see it: each owner would be
asked each second by all masters, about each."""
ELECTION_POLL_S: Final = 0.1
"""Between two looks at who owns a partition that changes hands, while an action waits for its next owner."""


@dataclass(frozen=True, slots=True)
class Action:
    """What an operator (`by`) asks for: begun here where this master owns the partition, else by a call of its owner."""

    begin: Callable[[LeaderRole], "Future[Any]"]
    method: str
    request: Any
    by: Actor


class MasterConsoleSource:
    """A kvstore.console.source.Source."""

    def __init__(self, master: MasterParts, status: MasterStatus, fellows: PeerMasters, *, address: str) -> None:
        """`address` is where the others know this master."""
        self._reactor, self._status, self._fellows, self._address = master.reactor, status, fellows, address
        self._standings = [partition.standing for partition in status.partitions]
        self._timeout_s = master.settings.control_timeout_s
        self._action_timeout_s = CONSOLE_ACTION_TIMEOUT_S
        """For an action to be durable, and for contents of a fellow."""
        self._told: dict[int, tuple[float, pb.StatusReply]] = {}
        """Of partitions of others, what their owners said last, and when."""
        self._silent: dict[str, str] = {}
        """Why owners did not answer at the last look, by their addresses."""
        self._asks_others = False

    def rest_s(self) -> float:
        """For a Watch."""
        return REST_S if self._asks_others or len(self._standings) > 1 else 0.0

    def snapshot(self) -> ClusterSnapshot:
        own, own_s = self._own(), time.monotonic()
        asked = self._begin({number: reply.owner.address for number, reply in enumerate(own) if _is_of_another(reply)})
        self._asks_others = bool(asked)
        replies, silent = [], dict[str, str]()
        for number, reply in enumerate(own):
            if reply.role != MasterRole.FOLLOWING:
                self._told.pop(number, None)
                replies.append(reply)
                continue
            try:
                replies.append(self._heard(number, asked[number]) if number in asked else self._as_last_told(number, reply))
            except KVStoreError as error:
                silent[reply.owner.address] = str(error)
                replies.append(self._as_last_told(number, reply))
        self._silent = silent
        told_s = [self._told[number][0] if number in self._told else own_s for number in range(len(own))]
        now_s = time.monotonic()
        found = merged_status(replies)
        for node in found.nodes:  # of the first partition
            node.heartbeat_age_s += now_s - told_s[0]
        owners = list(own[0].owners)  # as this master knows them: others may not have heard yet
        del found.owners[:]
        found.owners.extend(owners)
        return ClusterSnapshot(found, tuple(self._missing(own, address, why) for address, why in silent.items()), now_s - min(told_s))

    def masters(self) -> Sequence[MasterView]:
        own = self._own()
        role = MasterRole.OWNER if any(reply.role == MasterRole.OWNER for reply in own) else own[0].role
        records = [self._told[number][1].records if number in self._told else reply.records for number, reply in enumerate(own)]
        behind = max(0, sum(records) - sum(reply.records for reply in own)) if role == MasterRole.FOLLOWING else 0
        owners = {reply.owner.address: reply.owner.name for reply in own if _is_of_another(reply)}
        seen = [MasterView(self._address, own[0].name, role, behind)]
        seen += [MasterView(address, name, MasterRole.OWNER, 0, self._silent.get(address, "")) for address, name in sorted(owners.items())]
        others = {address: fellow.name for address, fellow in sorted(self._fellows.known().items()) if address not in owners}
        asked = {address: self._begin(dict.fromkeys(range(len(own)), address)) for address in others}
        return [*seen, *(self._follower(address, name, asked[address], sum(records)) for address, name in others.items())]

    def topologies(self) -> Sequence[pb.NodeTopology]:
        owner = self._owner_elsewhere(0)
        if owner:
            told: list[pb.NodeTopology] = self._fellows.ask(owner, "Topologies", pb.TopologiesRequest(), timeout_s=self._timeout_s)
            return told
        members = self._in_loop(lambda: list(self._standings[0].answering().directory.members))
        now_ns = self._reactor.now_ns()
        return [node_topology(node, now_ns) for node in members]

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        owner = self._owner_elsewhere(0)
        if owner:
            reply: pb.ContentsReply = self._fellows.ask(owner, "Contents", request, timeout_s=self._action_timeout_s)
            return reply
        return contents(self._in_loop, self._standings, None, request, now_ns=self._reactor.now_ns)

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        return self._in_loop(lambda: self._standings[0].audit().after(after))  # type: ignore[no-any-return]

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        owner = self._owner_elsewhere(0)
        if owner:
            reply: pb.SlowRequestsReply = self._fellows.ask(owner, "SlowRequests", pb.SlowRequestsRequest(), timeout_s=self._timeout_s)
            return reply.requests
        return self._in_loop(self._status.slow_requests)  # type: ignore[no-any-return]

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        place = "" if cancel else to or TO_PEERS
        request = pb.DrainRequest(node=node, to=to, cancel=cancel)
        self._of_node(node, Action(lambda leading: leading.drain(node, place, by), "Drain", request, by))

    def forget(self, node: str, by: Actor) -> None:
        self._of_node(node, Action(lambda leading: leading.forget(node, by), "Forget", pb.ForgetRequest(node=node), by))

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        request = pb.PinNamespaceRequest(tenant=tenant, namespace=namespace, pinned=pinned)
        return self._of_blocks(Action(lambda leading: leading.pin_all(tenant, namespace, by, pinned=pinned), "PinNamespace", request, by))

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        request = pb.RemoveNamespaceRequest(tenant=tenant, namespace=namespace)
        return self._of_blocks(Action(lambda leading: leading.remove_all(tenant, namespace, by), "RemoveNamespace", request, by))

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        given = {name: limit for name, limit in limits.items() if limit is not None}
        request = pb.SetQuotaRequest(tenant=tenant, limits=given, unlimited=[name for name in limits if name not in given])
        self._do(0, Action(lambda leading: leading.set_quota(tenant, limits, by), "SetQuota", request, by))

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        request = pb.ClearQuotaRequest(tenant=tenant, names=names)
        self._do(0, Action(lambda leading: leading.clear_quota(tenant, names, by), "ClearQuota", request, by))

    # --- what others know ---

    def _own(self) -> list[pb.StatusReply]:
        """Of each partition what this master knows; a turn of the loop for each."""
        return [self._in_loop(partial(self._status.of, partition)) for partition in self._status.partitions]

    def _begin(self, owners: Mapping[int, str]) -> dict[int, Callable[[], pb.StatusReply]]:
        """Ask the masters at these addresses about these partitions, all at once."""

        def begin(number: int, address: str) -> Callable[[], pb.StatusReply]:
            try:
                return self._fellows.begin(address, "Status", pb.StatusRequest(), partition=number, timeout_s=LOOK_S)
            except KVStoreError as error:
                return partial(_fail, error)

        return {number: begin(number, address) for number, address in owners.items()}

    def _heard(self, number: int, answer: Callable[[], pb.StatusReply]) -> pb.StatusReply:
        """Raises KVStoreError: it does not answer, or owns the partition no more."""
        found = answer()
        if found.role == MasterRole.FOLLOWING:
            raise refusal(None)
        self._told[number] = time.monotonic(), found
        return found

    def _as_last_told(self, number: int, own: pb.StatusReply) -> pb.StatusReply:
        """What its owner said last of a partition that nobody tells of now, with whose it is by now."""
        if number not in self._told:
            return own
        found = pb.StatusReply()
        found.CopyFrom(self._told[number][1])
        found.role = own.role
        found.owner.CopyFrom(own.owner)
        return found

    def _missing(self, own: Sequence[pb.StatusReply], address: str, why: str) -> str:
        mine = [number for number, reply in enumerate(own) if reply.owner.address == address]
        what = "the catalog" if len(own) == 1 else f"{len(mine)} of the {len(own)} partitions"
        ages = [time.monotonic() - self._told[number][0] for number in mine if number in self._told]
        shown = f"what is shown of it is {max(ages):.0f} s old" if len(ages) == len(mine) else "not all is shown"
        return f"{own[mine[0]].owner.name} at {address}, which owns {what}, does not answer: {why}; {shown}"

    def _follower(self, address: str, name: str, asked: Mapping[int, Callable[[], pb.StatusReply]], records: int) -> MasterView:
        try:
            known = sum(answer().records for answer in asked.values())
        except KVStoreError as error:
            return MasterView(address, name, error=str(error))
        return MasterView(address, name, MasterRole.FOLLOWING, max(0, records - known))

    # --- what owners do ---

    def _owner_elsewhere(self, number: int) -> str:
        """Where the partition's owner is; "" for this master. Raises NoOwner."""

        def look() -> str:
            standing = self._standings[number]
            if standing.role is not MasterRole.FOLLOWING:
                return ""
            if standing.owner is None:
                raise refusal(None)
            return standing.owner.address

        found: str = self._in_loop(look)
        return found

    def _at_owner(self, number: int, call: Callable[[str, Deadline], T]) -> T:
        """What comes of a call at the partition's owner, whose address it is given, "" for this master. While the partition changes hands
        its next owner is waited for: an operator cannot know of it, and would only ask again."""
        deadline = Deadline(self._action_timeout_s)
        while True:
            owner = self._await_owner(number, deadline)
            try:
                return call(owner, deadline)
            except Unavailable:
                time.sleep(deadline.up_to_s(ELECTION_POLL_S))  # it may know of its end before this master does
                if not deadline.up_to_s(1.0) or not self._is_no_longer(number, owner):
                    raise

    def _await_owner(self, number: int, deadline: Deadline) -> str:
        """As `_owner_elsewhere`. Raises NoOwner: there is none until the deadline."""
        while True:
            try:
                return self._owner_elsewhere(number)
            except NoOwner:
                pause_s = deadline.up_to_s(ELECTION_POLL_S)
                if not pause_s:
                    raise
                time.sleep(pause_s)

    def _is_no_longer(self, number: int, owner: str) -> bool:
        """Whether the partition is another one's, or nobody's, by now."""
        try:
            return self._owner_elsewhere(number) != owner
        except NoOwner:
            return True

    def _do(self, number: int, action: Action) -> Any:
        """Have the partition's owner do it: what comes of it, once that is durable."""

        def do(owner: str, deadline: Deadline) -> Any:
            if owner:
                return self._fellows.ask(
                    owner, action.method, action.request, partition=number, timeout_s=deadline.left_s(), actor=action.by
                )
            return self._wait(lambda: action.begin(self._standings[number].leading()), deadline)

        return self._at_owner(number, do)

    def _of_blocks(self, action: Action) -> int:
        """Of all partitions: of how many blocks."""
        done = [self._do(number, action) for number in range(len(self._standings))]
        return sum(one if isinstance(one, int) else one.blocks for one in done)

    def _of_node(self, node: str, action: Action) -> None:
        """At the owner of each partition that knows the node; of the first one, which says whether that may be, last."""
        for number in range(1, len(self._standings)):
            if self._knows(number, node):
                self._do(number, action)
        self._do(0, action)

    def _knows(self, number: int, node: str) -> bool:
        def look(owner: str, deadline: Deadline) -> bool:
            if owner:
                timeout_s = deadline.up_to_s(self._timeout_s)
                reply = self._fellows.ask(owner, "Status", pb.StatusRequest(), partition=number, timeout_s=timeout_s)
            else:
                reply = self._in_loop(partial(self._status.of, self._status.partitions[number]))
            if reply.role == MasterRole.FOLLOWING:  # which knows no nodes
                raise refusal(None)
            return any(known.name == node for known in reply.nodes)

        return self._at_owner(number, look)

    def _in_loop(self, function: Callable[[], Any]) -> Any:
        return self._reactor.call(function, deadline_s=self._timeout_s)

    def _wait(self, begin: Callable[[], "Future[Any]"], deadline: Deadline) -> Any:
        """What comes of it, once that is durable. Raises what `begin` raises, Unavailable, CatalogUnavailable: it takes too long."""
        try:
            return self._in_loop(begin).result(deadline.left_s())
        except TimeoutError:
            raise CatalogUnavailable(IT_GOES_ON) from None


def _is_of_another(reply: pb.StatusReply) -> bool:
    return reply.role == MasterRole.FOLLOWING and bool(reply.owner.name)


def _fail(error: KVStoreError) -> pb.StatusReply:
    raise error
