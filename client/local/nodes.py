"""The nodes of this host whose index and desk this client has: how it comes to them, and when it lets go of them. Sans-I/O for what asks a
node (see effects.py); a look at what is there asks nobody.

A node frees what a desk keeps, views among it, when the desk's connection ends, as one does whose answer is not awaited. So nothing is
asked over it that a caller's deadline, his cancellation or a signal could cut short: for slabs there are the pool's other connections,
and the next index is asked for in the background.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.routes import KnownNode
from kvstore.client.connections.slabs import SlabMapping
from kvstore.client.core.effects import AcquireConnectionEffect, AnyLoan, Operation, RequestFdsEffect, SpawnEffect
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.local.reader_slots import LocalReaderSlots
from kvstore.client.local.shared_index import FOREVER_NS, SharedIndexReader
from kvstore.protocol.errors import Closed, DeadlineExceeded, Fenced, InvalidTicket, KVStoreError, ProtocolError, Unreachable
from kvstore.protocol.node_messages import OpenIndex
from kvstore.protocol.shared_index import AT_HEARTBEAT
from kvstore.rpc.deadline import Deadline

PROBE_NS: Final = 100_000_000
"""A heartbeat older than this (a node beats five times as often) makes a client ask the kernel whether the node hung up."""
STALE_NS: Final = 1_000_000_000
"""Nothing is read from a node whose heartbeat is older than this: it is stopped, or starved, and its master may have given it up."""
LOOK_NS: Final = 20_000_000
"""How often a client looks whether something has changed."""
ATTACH_S: Final = 1.0
ATTACH_SHARE: Final = 4
"""A node that does not answer costs a call so much of its deadline, and no more than ATTACH_S: the others go on without its index."""
RETRY_FACTOR: Final = 10
"""What has taken long and come to nothing is not tried again before so many times as long."""
RETRY_NS: Final = 1_000_000_000
"""How long after a node of this host could not be attached to, or none was there, it is tried again. Where others are ready nobody waits
for that."""


class LocalNode:
    """One node: its index, this client's desk, and the slabs mapped so far. It holds a connection, which is the desk's."""

    def __init__(self, node: KnownNode, loan: AnyLoan, index: SharedIndexReader, desk: LocalReaderSlots) -> None:
        self.node_id, self.name = node.node_id, node.name
        self.who = node.route.who
        self.loan = loan
        self.index = index
        """The one of now; a larger one may take its place."""
        self.desk = desk
        self.epoch = loan.channel.welcome.epoch
        self.slabs: dict[int, memoryview] = {}
        """Mapped slabs, read-only."""
        self.slabs_gone = index.slabs_gone
        self._is_lost = False

    def is_fresh(self, now_ns: int) -> bool:
        """Whether what the index says counts now."""
        age_ns = self.index.age_ns(now_ns)
        if age_ns < PROBE_NS and not self.desk.is_over:
            return True
        if self._is_lost or age_ns == FOREVER_NS or self.desk.is_over:
            return False
        self._is_lost = self.loan.channel.is_closed_by_peer()
        return not self._is_lost and age_ns < STALE_NS

    @property
    def fresh_until_ns(self) -> int:
        """Until when it is fresh without another look, if it is now."""
        return self.index.words[AT_HEARTBEAT] + PROBE_NS

    @property
    def needs_asking(self) -> bool:
        """For another index, for what became of its slabs, or whether it is there at all."""
        return self.is_lost or self.index.is_over or self.slabs_gone != self.index.slabs_gone

    def prune(self, held: Iterable[int]) -> None:
        """Only these slabs are mapped still."""
        kept = set(held)
        for slab in [slab for slab in self.slabs if slab not in kept]:
            self.slabs.pop(slab, None)

    @property
    def is_lost(self) -> bool:
        """The node's process is gone, or it has hung up: its index says nothing any more, and its desk keeps nothing."""
        return self._is_lost or self.desk.is_over

    def close(self) -> None:
        self.loan.discard()
        self.slabs.clear()


def _share_of(deadline: Deadline) -> Deadline:
    return deadline.part(min(ATTACH_S, deadline.left_s() / ATTACH_SHARE))


class LocalNodes:
    """See the module. Threads and tasks of a client share it: `ready` is replaced, never changed; one at a time asks nodes."""

    def __init__(
        self, daemons: ClusterConnections, mapping: SlabMapping, *, is_used: bool = True, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Not `is_used`: there never are any."""
        self._daemons = daemons
        self._mapping = mapping
        self.clock_ns = clock_ns
        self._asking = threading.Lock()
        self._due_ns = 0
        self._retry_ns = 0
        """When nodes are tried again that could not be attached to."""
        self._is_outdated = False
        """A node answered that is not as the master described it: it was restarted. The master is asked once more."""
        self._nodes_version = -1
        self._is_closed = not is_used
        self.process = ForkGeneration.number
        self._ended = (0, 0, 0, 0)
        """What was counted at desks that are given up."""
        self.ready: tuple[LocalNode, ...] = ()
        self.at_hand: tuple[int, tuple[LocalNode, ...]] = (0, ())
        """Until when nothing has to be looked at, by the clock, and the nodes that are read until then: a look into several words of
        each of them at every call would cost more than the read."""

    def fresh(self) -> tuple[LocalNode, ...]:
        """Those whose index counts now; none in a forked child."""
        if self.process != ForkGeneration.number:
            return ()
        now_ns = self.clock_ns()
        return tuple(node for node in self.ready if node.is_fresh(now_ns))

    def renew(self) -> bool:
        """Look again at what is at hand. False: nodes are to be asked first, by `attach`."""
        if self._may_find_more():
            return False
        self._look()
        return True

    def is_due(self) -> bool:
        """Whether `attach` may find more than is ready: to be asked when what is at hand is to be looked at again."""
        is_due = self._may_find_more()
        if is_due:
            self._due_ns = self.clock_ns() + LOOK_NS
        self._look()
        return is_due

    def _may_find_more(self) -> bool:
        if self._is_closed or self.clock_ns() < self._due_ns:
            return False
        is_as_told = self._nodes_version == self._daemons.nodes.version
        return not self.ready or not is_as_told or any(node.needs_asking for node in self.ready) or self._is_retry_due()

    def _missing(self) -> list[KnownNode]:
        """Nodes of this host that are not ready. One that was restarted, or whose socket answers again, is back without a word of the
        master's."""
        ready = {node.node_id for node in self.ready}
        return [known for known in self._daemons.nodes.local() if known.node_id not in ready]

    def _is_retry_due(self) -> bool:
        return self.clock_ns() >= self._retry_ns and (self._is_outdated or bool(self._missing()))

    def _look(self) -> None:
        """Have those at hand that count now, until one of them may not."""
        fresh = self.fresh()
        self.at_hand = min([self.clock_ns() + LOOK_NS, *(node.fresh_until_ns for node in fresh)]), fresh
        if self._is_closed:
            self.at_hand = FOREVER_NS, ()

    def attach(self, deadline: Deadline, *, waits: bool = False) -> Operation[None]:
        """Take a desk at each node of this host, as far as that goes: what fails is left for later. Another thread's call goes on alone.

        Where others are ready, nodes that were missing before are tried again in the background, unless it `waits` for them.
        """
        if not self._asking.acquire(blocking=False):
            return
        try:
            begun_ns = self.clock_ns()
            self._due_ns = begun_ns + RETRY_NS
            nodes = self._daemons.nodes
            if not nodes.is_known:
                yield from self._daemons.refresh_nodes(deadline)
            is_as_told = self._nodes_version == nodes.version
            self._nodes_version = nodes.version
            self._drop_lost()
            for node in self.ready:
                with suppress(KVStoreError):  # one that has gone meanwhile is dropped the next time
                    yield from self._let_go(node, _share_of(deadline))
            if waits or not self.ready or not is_as_told:
                yield from self._attach_missing(deadline)
            took_ns = self.clock_ns() - begun_ns
            self._due_ns = begun_ns + max(RETRY_NS, RETRY_FACTOR * took_ns)
            if self.ready and not any(node.needs_asking for node in self.ready):
                self._due_ns = 0  # all is well: what changes next is noticed at the next look
        except KVStoreError:
            return  # whoever asks next the old way is told what is wrong
        finally:
            self._look()
            self._asking.release()
        if any(node.index.is_over for node in self.ready) or self._is_retry_due():
            with suppress(RuntimeError):  # the system has no thread for it; the next look tries again
                yield SpawnEffect(self._catch_up())

    def _attach_missing(self, deadline: Deadline) -> Operation[None]:
        begun_ns = self.clock_ns()
        if self._is_outdated:
            self._is_outdated = False
            with suppress(KVStoreError):
                yield from self._daemons.refresh_nodes(_share_of(deadline))
        for known in self._missing():
            with suppress(KVStoreError):
                yield from self._attach_to(known, _share_of(deadline))
        self._retry_ns = begun_ns + max(RETRY_NS, RETRY_FACTOR * (self.clock_ns() - begun_ns))

    def _catch_up(self) -> Operation[None]:
        """The larger index of each node that has one by now, and a desk at those that could not be attached to before. Another call that
        asks nodes goes first: then the next look tries again."""
        if not self._asking.acquire(blocking=False):
            self._due_ns = self.clock_ns() + LOOK_NS
            return
        try:
            for node in self.ready:
                if node.index.is_over:
                    with suppress(KVStoreError):
                        node.index, _ = yield from self._ask(node.loan, Deadline(ATTACH_S))
                        self._due_ns = min(self._due_ns, self.clock_ns() + LOOK_NS)
            if self._is_retry_due():
                yield from self._attach_missing(Deadline(ATTACH_S * ATTACH_SHARE))
        finally:
            self._look()
            self._asking.release()

    def map_slabs(self, node: LocalNode, slabs: Sequence[int], deadline: Deadline) -> Operation[None]:
        """Have these mapped, as far as the node has them in a share of the time, and those unmapped that it has given up. Another thread's
        call goes on alone."""
        if not self._asking.acquire(blocking=False):
            return
        try:
            share = _share_of(deadline)
            with (yield from self._connect(node, share)) as loan:
                found = yield from self._mapping.map_slabs(loan.channel, node.node_id, slabs, share, writable=False)
            node.slabs.update(zip(slabs, (slab.memory for slab in found), strict=True))
            self._daemons.unshared.shared(node.name)
        except KVStoreError as error:
            self._note(node.name, node.loan, error)  # a get of what lies there goes the old way
        finally:
            node.prune(self._mapping.slabs.held(node.node_id, node.epoch))
            self._asking.release()

    def _note(self, node: str, loan: AnyLoan, error: BaseException) -> None:
        """It answers and refuses, or what it gave cannot be mapped. Nothing is told of a node that is going or slow, nor of a lost slab."""
        is_passing = isinstance(error, Unreachable | DeadlineExceeded | Fenced | Closed)
        if isinstance(error, KVStoreError) and not is_passing and loan.channel.is_open:
            self._daemons.unshared.note(node, str(error))

    def _let_go(self, node: LocalNode, deadline: Deadline) -> Operation[None]:
        """Unmap the slabs that the node has given up."""
        gone = node.index.slabs_gone
        if node.slabs_gone != gone:
            with (yield from self._connect(node, deadline)) as loan:
                yield from self._mapping.let_go(loan.channel, node.node_id, deadline)
            node.slabs_gone = gone
            node.prune(self._mapping.slabs.held(node.node_id, node.epoch))

    def _connect(self, node: LocalNode, deadline: Deadline) -> Operation[AnyLoan]:
        """A connection to that very process, but the desk's. Raises Unreachable, and what Take does."""
        known = self._daemons.nodes.get(node.node_id)
        if known is None or not known.route.is_local:
            raise Unreachable(f"the master names no node {node.name!r} of this host now")
        loan = yield from self._take(known, deadline)
        if loan.channel.welcome.epoch != node.epoch:
            loan.discard()
            raise Unreachable(f"node {node.name!r} is another process by now")
        return loan

    def _take(self, node: KnownNode, deadline: Deadline) -> Operation[AnyLoan]:
        address = node.route.address()
        try:
            loan: AnyLoan = yield AcquireConnectionEffect(address, deadline, node.route.hello)
        except InvalidTicket:  # it has ended, or the node is another process by now
            yield from self._daemons.refresh_nodes(deadline)
            self._is_outdated = self._daemons.nodes.get(node.node_id) is None  # it has not registered yet
            loan = yield AcquireConnectionEffect(address, deadline, node.route.hello)
        if not node.route.is_meant(address, loan.channel.welcome):
            loan.discard()
            self._is_outdated = True
            raise Unreachable(f"at {address} there is another daemon by now")
        return loan

    def _attach_to(self, node: KnownNode, deadline: Deadline) -> Operation[None]:
        loan = yield from self._take(node, deadline)
        try:
            found = LocalNode(node, loan, *(yield from self._ask(loan, deadline)))
            if self._is_closed:
                raise Closed("the client is closed")
            self.ready = (*self.ready, found)
            self._daemons.unshared.shared(node.name)
        except BaseException as error:
            self._note(node.name, loan, error)
            loan.discard()
            raise

    def _ask(self, loan: AnyLoan, deadline: Deadline) -> Operation[tuple[SharedIndexReader, LocalReaderSlots]]:
        """The index of now and the connection's desk. Raises ProtocolError and Broken, too."""
        answer, fds = yield RequestFdsEffect(loan.channel, OpenIndex(), deadline)
        try:
            if len(fds) != 2:
                raise ProtocolError(f"a node gave {len(fds)} descriptors for an index and a desk")
            return SharedIndexReader(fds[0], answer.sizes[0]), LocalReaderSlots(fds[1], answer.sizes[1])
        finally:
            for fd in fds:
                os.close(fd)

    def _drop_lost(self) -> None:
        """Those that are gone, and those that the master does not name: one that has just taken over names none yet."""
        nodes = self._daemons.nodes
        known = {(node.node_id, node.route.who) for node in nodes.local()}
        lost = [node for node in self.ready if node.is_lost or (nodes.is_known and (node.node_id, node.who) not in known)]
        self.ready = tuple(node for node in self.ready if node not in lost)
        for node in lost:
            self._end(node)

    def counts(self) -> tuple[int, int, int, int]:
        """Calls that were served here, blocks read, their bytes, and blocks that nodes refused to hold."""
        found = self._ended
        for node in self.ready:
            found = _with(found, node.desk)
        return found

    def _end(self, node: LocalNode) -> None:
        """It is not ready any more. Its desk goes with its last view."""
        self._ended = _with(self._ended, node.desk)
        node.close()

    def close(self) -> None:
        """Hang up. A second close is a no-op."""
        self._is_closed = True
        ready, self.ready, self.at_hand = self.ready, (), (FOREVER_NS, ())
        for node in ready:
            self._end(node)


def _with(counts: tuple[int, int, int, int], desk: LocalReaderSlots) -> tuple[int, int, int, int]:
    """These, and what was counted at one more desk."""
    calls, hits, bytes_in, unheld = counts
    return calls + desk.calls, hits + desk.hits, bytes_in + desk.bytes_in, unheld + desk.unheld
