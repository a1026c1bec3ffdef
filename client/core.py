"""What every operation of a client is made of: reaching daemons, asking them, and the simple questions. Sans-I/O: see effects.py.

Reads are in reading.py, writes in writing.py. One core serves all threads or tasks of a client; what they share (hints, slabs,
counters, routes) is thread-safe.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Final, Protocol, TypeVar

from kvstore.client.config import ClientSettings
from kvstore.client.effects import AnyChannel, AnyLoan, Ask, AskForFds, Later, Move, Operation, Take, Work
from kvstore.client.locations import Hints, Location, tier_names
from kvstore.client.remote import RemoteMemory, SlabId
from kvstore.client.routes import IsHere, KnownNode, KnownNodes, Masters, Route, nowhere
from kvstore.client.slabs import SlabCache, SlabKey
from kvstore.client.stats import Counters
from kvstore.protocol.errors import (
    DeadlineExceeded,
    Denied,
    Fenced,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.frames import MAX_BATCH, check_key
from kvstore.protocol.master_messages import Cancel, Exists, Locations, Lookup, MatchPrefix, NodeTable, Pin, Remove
from kvstore.protocol.master_messages import Nodes as AskNodes
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import RegionList, Regions, Slabs
from kvstore.protocol.session_messages import Count, Flags, Ok
from kvstore.rpc.channel import MAX_FDS
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapping import Slab
from kvstore.transfer.memory.memcpy import MemcpyPool
from kvstore.transfer.paths.peer import Peer, PeerRegion
from kvstore.transfer.paths.spans import Copy
from kvstore.transfer.paths.transports import AUTO

M = TypeVar("M", bound=Message)

log = logging.getLogger("kvstore.client")

MAX_SLAB_WORK: Final = 1 << 30
"""Mapping a slab faults all of its pages in: never on an event loop."""
CLEANUP_S: Final = 0.2
"""Time for telling a daemon that something will not come, after the operation failed and perhaps used up its own."""
TIDY_S: Final = 5.0
"""The same in the background, where nobody waits for it."""


class Unused(Protocol):
    """A put that is over and has used part of what it reserved."""

    def unused(self) -> Cancel:
        """What gives back the rest."""


class Core:
    """The state of one client and the operations that do not move values."""

    def __init__(
        self, masters: str | Sequence[str], settings: ClientSettings, transfer: TransferSettings, *, is_here: IsHere, spread: int
    ) -> None:
        """Raises InvalidArgument for a malformed address."""
        self.settings = settings
        if not maps_memory(transfer):
            is_here = nowhere
        self.masters = Masters(masters, is_here)
        self.nodes = KnownNodes(is_here, spread)
        self.hints = Hints(settings.max_hints)
        self.slabs = SlabCache()
        self.counters = Counters()
        self.copier = MemcpyPool(settings.copy_threads)
        self.remote = RemoteMemory(transfer)
        self.unused: deque[Unused] = deque()
        """Puts that failed or were interrupted, until the master knows that what they reserved will not be used."""

    def close(self) -> None:
        """Let go of threads and mappings; views keep theirs."""
        self.copier.close()
        self.remote.close()
        self.slabs.clear()

    # --- reaching daemons ---

    def begin(
        self, route: Route, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M]]:
        """Ask a daemon and keep the channel: (loan, answer). The caller gives the loan back. Raises Unreachable when no address works."""
        while True:
            begun = yield from self._attempt(route, message, answer, deadline, payload)
            if begun is not None:
                return begun

    def begin_shared(self, route: Route, message: Message, answer: type[M], deadline: Deadline) -> Operation[tuple[AnyLoan, M] | None]:
        """As `begin`, through the Unix socket only: None when there is no way through it."""
        while route.is_local:
            begun = yield from self._attempt(route, message, answer, deadline)
            if begun is not None:
                return begun
        return None

    def _attempt(
        self, route: Route, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M] | None]:
        """One channel's try; None when another one may work: an idle one's peer has gone since, or there is another address.

        Nothing is asked of a daemon that is not the one meant: its answer would be a miss where the value is there.
        """
        address = route.address()
        try:
            loan: AnyLoan = yield Take(address, deadline)
        except Unavailable as error:
            if route.failed(address):
                return None
            raise Unreachable(str(error)) from None
        welcome = loan.channel.welcome
        if not route.is_meant(address, welcome):
            loan.discard()
            if route.failed(address):
                return None
            raise Unreachable(f"at {address} there is another daemon by now, {welcome.name!r}")
        if not loan.reused:
            route.welcomed(welcome)
        try:
            return loan, (yield Ask(loan.channel, message, answer, deadline, payload))
        except BaseException as error:
            broke = isinstance(error, Unavailable) and not loan.channel.is_open
            loan.give_back(error)
            if broke and loan.reused:
                return None
            if broke:
                raise Unreachable(str(error)) from None
            raise

    def ask_master(
        self, message: Message, answer: type[M], deadline: Deadline, *, note: Callable[[M], object] | None = None
    ) -> Operation[M]:
        """Ask the master in use, else the others in order. Raises Unavailable when none answers.

        `note`, a function of C, gets the answer before anything can be raised: until it has it, the connection is closed by whatever is.
        """
        failure: Unreachable | None = None
        for route in self.masters.in_order():
            try:
                loan, reply = yield from self.begin(route, message, answer, deadline)
            except Unreachable as error:
                failure = failure or error
                continue
            if note is not None:
                note(reply)
            self.nodes.heard_from(loan.channel.welcome.epoch)
            loan.give_back()
            self.masters.stick_to(route)
            return reply
        assert failure is not None
        raise Unavailable(f"no master can be reached: {failure}")

    def cancel(self, message: Cancel, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Give reservations back, as far as the master can be told soon; the others expire."""
        if message.keys:
            with contextlib.suppress(KVStoreError):
                yield from self.ask_master(message, Ok, Deadline(timeout_s))

    def give_up_unused(self, timeout_s: float = CLEANUP_S) -> Operation[None]:
        """Give back what the puts in `unused` had reserved. Several threads may do so at once: to cancel twice does no harm."""
        while self.unused:
            put = self.unused[0]
            try:
                yield from self.cancel(put.unused(), timeout_s)
            finally:
                with contextlib.suppress(ValueError):
                    self.unused.remove(put)

    def refresh_nodes(self, deadline: Deadline) -> Operation[None]:
        self.nodes.replace((yield from self.ask_master(AskNodes(), NodeTable, deadline)))

    def find_node(self, node_id: int, deadline: Deadline) -> Operation[KnownNode | None]:
        """None for a node that the master does not know either."""
        if self.nodes.get(node_id) is None:
            yield from self.refresh_nodes(deadline)
        return self.nodes.get(node_id)

    def node_to_avoid(self, node_id: int, deadline: Deadline) -> Operation[int]:
        """After a node could not be reached: its id, or 0 if the master knows it at another place by now."""
        old = self.nodes.get(node_id)
        yield from self.refresh_nodes(deadline)
        new = self.nodes.get(node_id)
        return node_id if new is None or new is old else 0

    # --- shared memory ---

    def map_slabs(
        self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline, *, writable: bool
    ) -> Operation[list[Slab]]:
        """Have these slabs mapped: they, in order. Raises StaleHandle for one that is gone, Broken for one that cannot be mapped."""
        keys = [SlabKey(node_id, channel.welcome.epoch, slab, writable) for slab in slabs]
        missing = self.slabs.missing(keys)
        if not missing:
            return self.slabs.get(keys)
        if coming := self.slabs.coming(missing):
            yield Work(partial(wait, coming, deadline.left_s()), MAX_SLAB_WORK)
            missing = self.slabs.missing(missing)
        for start in range(0, len(missing), MAX_FDS):
            wanted = missing[start : start + MAX_FDS]
            found = yield from self._ask_for_slabs(channel, wanted, deadline)
            yield Work(partial(self.slabs.map_now, found), MAX_SLAB_WORK)
            if len(found) < len(wanted):
                raise StaleHandle(f"node {node_id} named a slab that it does not have")
        return self.slabs.get(keys)

    def map_ahead(self, channel: AnyChannel, node_id: int, slabs: Sequence[int], deadline: Deadline) -> Operation[None]:
        """Have slabs that later puts will use mapped in the background."""
        keys = self.slabs.missing([SlabKey(node_id, channel.welcome.epoch, slab, True) for slab in slabs])[:MAX_FDS]
        if keys and not self.slabs.coming(keys):
            found = yield from self._ask_for_slabs(channel, keys, deadline)
            self.slabs.announce([key for key, _, _ in found])
            yield Later(partial(self.slabs.map_announced, found))

    def _ask_for_slabs(self, channel: AnyChannel, keys: Sequence[SlabKey], deadline: Deadline) -> Operation[list[tuple[SlabKey, int, int]]]:
        """(key, descriptor, size) of those the node still has. Mappings of slabs that it has given up since end here, so that their memory
        does: whoever maps nothing new holds at most what the node had at one time."""
        node_id, epoch = keys[0].node_id, keys[0].epoch
        held = self.slabs.held(node_id, epoch)[:MAX_BATCH]
        answer, fds = yield AskForFds(channel, Slabs([key.slab for key in keys], int(keys[0].writable), held), deadline)
        self.slabs.drop(node_id, epoch, answer.gone)
        there = [(key, size) for key, size in zip(keys, answer.sizes, strict=False) if size]
        return [(key, fd, size) for (key, size), fd in zip(there, fds, strict=False)]

    # --- other hosts' memory ---

    def peer_of(self, node: KnownNode) -> Operation[Peer]:
        """A node of another host as the transfer engine's peer. Raises Unreachable, and ConfigError for settings that cannot be met."""
        if not self.remote.is_started:
            yield Work(lambda: self.remote.engine, MAX_SLAB_WORK)
        return self.remote.peer(node)

    def move(self, node: KnownNode, copies: Sequence[Copy], deadline: Deadline) -> Operation[None]:
        """Have the transfer engine make these copies from or to a node. Raises Unreachable: it cannot, whatever the reason; and
        DeadlineExceeded: that node's engine is left alone for a while then, or every call would wait for it in vain."""
        try:
            yield Move(self.remote.engine, copies, deadline)
        except DeadlineExceeded:
            self.remote.failed(node)
            raise
        except (Unavailable, Fenced, Denied, ProtocolError) as error:
            raise Unreachable(f"the transfer engine cannot move values of node {node.name}: {error}") from None
        self.counters.add(engine_bytes=sum(size_bytes for _, _, size_bytes in copies))

    def engine_failed(self, node: KnownNode, error: KVStoreError, deadline: Deadline) -> Operation[None]:
        """A node's engine could not be used: leave it alone for a while, unless there is another way by now: this host's links have
        changed, or the master knows of a change of the node's."""
        log.warning("values of node %s go by message: %s", node.name, error)
        if (yield Work(self.remote.refresh, MAX_SLAB_WORK)):
            self.remote.forget(node.node_id)
        else:
            self.remote.failed(node)
        yield from self.refresh_nodes(deadline)

    def show_slabs(self, channel: AnyChannel, node: KnownNode, slabs: Sequence[int], deadline: Deadline) -> Operation[list[PeerRegion]]:
        """These slabs of a node of another host, in order, as the transfer engine reads them. Raises StaleHandle, Unreachable."""
        peer = yield from self.peer_of(node)
        ids = [SlabId(node.node_id, channel.welcome.epoch, slab) for slab in slabs]
        missing = self.remote.missing(ids)
        for start in range(0, len(missing), MAX_FDS):
            part = missing[start : start + MAX_FDS]
            answer: RegionList = yield Ask(channel, Regions([slab.slab for slab in part]), RegionList, deadline)
            if len(answer.regions) != len(part) or not all(answer.regions):
                raise StaleHandle(f"node {node.node_id} named a slab that it does not have")
            for slab, description in zip(part, answer.regions, strict=True):
                self.remote.add(slab, self.remote.region(peer, description))
        found = [self.remote.slab(slab) for slab in ids]
        if None in found:
            raise StaleHandle(f"a slab of node {node.node_id} is gone")
        return [region for region in found if region is not None]

    # --- questions to the master ---

    def locate(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[list[Location]]]:
        self.counters.add(requests=1)
        check_keys(keys)
        found: list[list[Location]] = []
        for part in cut(keys):
            reply = yield from self.ask_master(Lookup(list(part)), Locations, deadline)
            if any(self.nodes.get(node_id) is None for node_id in reply.nodes):
                yield from self.refresh_nodes(deadline)
            found += self._locations(reply)
        return found

    def _locations(self, reply: Locations) -> Iterator[list[Location]]:
        replica = 0
        for i, count in enumerate(reply.replicas):
            locations = []
            for node_id, tiers in zip(reply.nodes[replica : replica + count], reply.tiers[replica : replica + count], strict=True):
                node = self.nodes.get(node_id)
                name = node.name if node is not None else ""
                locations.append(Location(name, node_id, tier_names(tiers), reply.sizes[i], reply.checksums[i], reply.generations[i]))
            replica += count
            yield locations

    def exists(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[list[bool]]:
        self.counters.add(requests=1)
        check_keys(keys)
        return (yield from self._flags([Exists(list(part)) for part in cut(keys)], deadline))

    def match_prefix(self, keys: Sequence[bytes], deadline: Deadline) -> Operation[int]:
        self.counters.add(requests=1)
        check_keys(keys)
        matched = 0
        for part in cut(keys):
            count = (yield from self.ask_master(MatchPrefix(list(part)), Count, deadline)).value
            matched += count
            if count < len(part):
                break
        return matched

    def remove(self, keys: Sequence[bytes], deadline: Deadline, *, force: bool) -> Operation[int]:
        self.counters.add(requests=1)
        check_keys(keys)
        self.hints.forget(keys)
        return sum((yield from self._flags([Remove(list(part), int(force)) for part in cut(keys)], deadline)))

    def pin(self, keys: Sequence[bytes], deadline: Deadline, *, pinned: bool) -> Operation[list[bool]]:
        self.counters.add(requests=1)
        check_keys(keys)
        return (yield from self._flags([Pin(list(part), int(pinned)) for part in cut(keys)], deadline))

    def _flags(self, messages: Sequence[Message], deadline: Deadline) -> Operation[list[bool]]:
        flags: list[bool] = []
        for message in messages:
            flags += map(bool, (yield from self.ask_master(message, Flags, deadline)).flags)
        return flags


def maps_memory(transfer: TransferSettings) -> bool:
    """Whether nodes of this host are reached by shared memory: so unless the transports chosen leave it out."""
    return transfer.transports == AUTO or "shm" in [name.strip() for name in transfer.transports.split(",")]


def cut(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Parts that one message takes; none for no keys."""
    return [keys[start : start + MAX_BATCH] for start in range(0, len(keys), MAX_BATCH)]


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises InvalidArgument unless every key is 1 to 255 bytes and `keys` is not itself one key."""
    if isinstance(keys, (bytes, str)):
        raise InvalidArgument("keys is a sequence of keys, not one key")
    for key in keys:
        check_key(key)
