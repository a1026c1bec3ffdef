"""How values are written: reserve at the master, copy to the node it names, and what to do when another writer is at it or a node
is gone. Sans-I/O: see effects.py."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from kvstore.client.buffers import checksum
from kvstore.client.effects import AnyLoan, Ask, Operation, Sleep, work
from kvstore.client.locations import Hint
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable, Unreachable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Cancel, Grants, Reserve
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ASK_AGAIN, STORED, Commit, Open, Opened, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.paths.peer import Peer
from kvstore.transfer.paths.spans import Copy

FIRST_PAUSE_S: Final = 0.001
UNRESERVED: Final = 0
"""Generation of a value that the node is to claim at the master. As a hint's it means any."""
MAX_PAUSE_S: Final = 0.05
"""Between questions about a key that another writer holds: doubles from the first to the last."""


class Writing:
    """One put of a batch. Use once: `yield from Writing(...).run()`. Keys, sources and parents are equally long."""

    def __init__(
        self,
        resources: ClientResources,
        keys: Sequence[bytes],
        sources: Sequence[memoryview],
        *,
        namespace: str,
        parents: Sequence[bytes | None] | None,
        deadline: Deadline,
    ) -> None:
        self._resources = resources
        self._keys = keys
        self._sources = sources
        self._namespace = namespace
        self._parents = [parent or b"" for parent in parents] if parents is not None else [b""] * len(keys)
        self._deadline = deadline
        self._stored = [False] * len(keys)
        self._granted: dict[int, int] = {}
        """Generations reserved for this operation and not yet written, by the key's index."""
        self._asked: list[int] = []
        self._told: list[Grants] = []
        """The master's answer for `_asked`, from its arrival until `_granted` has what it says."""
        self._avoid = 0

    def run(self) -> Operation[list[bool]]:
        """True for each key that this call stored; a key repeated in the batch is stored once.

        Raises Full, Unavailable, DeadlineExceeded (another writer held a key, or a daemon was slow), CatalogUnavailable. Keys written
        before the error stay; reservations of the others are given back.
        """
        resources = self._resources
        first: dict[bytes, int] = {}
        for index, key in enumerate(self._keys):
            first.setdefault(key, index)
        pending = list(first.values())
        try:
            for start in range(0, len(pending), MAX_BATCH):
                yield from self._store(pending[start : start + MAX_BATCH])
        except BaseException as error:
            resources.reservations.unused.append(self)  # first: an interrupt may follow an interrupt
            if isinstance(error, KVStoreError):
                yield from resources.reservations.give_up_unused()
            raise
        finally:
            stored = self._stored.count(True)
            out = sum(len(source) for source, done in zip(self._sources, self._stored, strict=True) if done)
            resources.counters.add(requests=1, puts=stored, already_present=len(self._keys) - stored, bytes_out=out)
        return self._stored

    def _store(self, pending: list[int]) -> Operation[None]:
        pause_s = FIRST_PAUSE_S
        while True:
            busy: list[int] = []
            lost: list[int] = []
            unreserved, others = yield from self._split(pending)
            if unreserved:
                lost += yield from self._write_to(self._resources.daemons.nodes.local_id, unreserved, busy)
            if others:
                for node_id, indices in (yield from self._reserve(others, busy)).items():
                    lost += yield from self._write_to(node_id, indices, busy)
            progress = len(busy) + len(lost) < len(pending)
            pending = busy + lost
            if not pending:
                return
            self._resources.counters.add(retries=1)
            if progress:
                pause_s = FIRST_PAUSE_S
            if not lost:
                yield Sleep(min(pause_s, self._deadline.left_s()))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _split(self, pending: list[int]) -> Operation[tuple[list[int], list[int]]]:
        """Small values for the node on this host need no reservation: that node claims them, which saves a round trip. And the rest."""
        resources = self._resources
        if not resources.daemons.nodes.is_known:
            yield from resources.daemons.refresh_nodes(self._deadline)
        if not resources.daemons.nodes.local_id or resources.daemons.nodes.local_id == self._avoid:
            return [], pending
        inline_bytes = self._resources.settings.put_inline_bytes
        unreserved = [i for i in pending if len(self._sources[i]) <= inline_bytes]
        self._granted.update(dict.fromkeys(unreserved, UNRESERVED))
        if len(unreserved) == len(pending):
            return unreserved, []
        return unreserved, [i for i in pending if len(self._sources[i]) > inline_bytes]

    def _reserve(self, pending: list[int], busy: list[int]) -> Operation[dict[int, list[int]]]:
        """Ask the master; the granted keys by node."""
        resources = self._resources
        keys = [self._keys[i] for i in pending]
        sizes = [len(self._sources[i]) for i in pending]
        self._asked = pending
        reserve = Reserve(keys, sizes, resources.daemons.nodes.local_id, self._avoid)
        reply = yield from resources.daemons.ask_master(reserve, Grants, self._deadline, note=self._told.append)
        self._note_grants()
        by_node: dict[int, list[int]] = {}
        for i, status, node_id in zip(pending, reply.statuses, reply.nodes, strict=True):
            if status == GRANTED:
                by_node.setdefault(node_id, []).append(i)
            elif status == BUSY:
                busy.append(i)
        return by_node

    def _note_grants(self) -> None:
        for reply in self._told:
            granted = zip(self._asked, reply.statuses, reply.generations, strict=True)
            self._granted.update({i: generation for i, status, generation in granted if status == GRANTED})
        self._told.clear()

    def _cancel(self, indices: Sequence[int]) -> Operation[None]:
        """Give reservations back, as far as the master can be told."""
        yield from self._resources.reservations.cancel(self._cancellation(indices))
        for i in indices:
            self._granted.pop(i, None)

    def _cancellation(self, indices: Sequence[int]) -> Cancel:
        granted = [(i, self._granted[i]) for i in indices if self._granted.get(i, UNRESERVED) != UNRESERVED]
        return Cancel([self._keys[i] for i, _ in granted], [generation for _, generation in granted])

    def unused(self) -> Cancel:
        """What gives back all that was reserved and not used. For an operation that is over."""
        self._note_grants()
        return self._cancellation(list(self._granted))

    # --- writing to one node ---

    def _write_to(self, node_id: int, indices: list[int], busy: list[int]) -> Operation[list[int]]:
        """Write these keys; those that are to be reserved elsewhere, because this node is gone or has moved. A second gone is an error."""
        try:
            node = yield from self._resources.daemons.find_node(node_id, self._deadline)
            if node is None:
                raise Unavailable(f"node {node_id} is not among the live nodes")
            for part in self._parts(indices):
                yield from self._write(node, part, busy)
        except Unavailable:
            if self._avoid:
                raise
            self._avoid = yield from self._resources.daemons.node_to_avoid(node_id, self._deadline)
            lost = [i for i in indices if i in self._granted]
            yield from self._cancel(lost)
            return lost
        return []

    def _parts(self, indices: list[int]) -> Iterator[list[int]]:
        """Cut where one message's values become too many."""
        part: list[int] = []
        frame_bytes = left = int(self._resources.settings.frame_bytes)
        for i in indices:
            if part and len(self._sources[i]) > left:
                yield part
                part, left = [], frame_bytes
            part.append(i)
            left -= len(self._sources[i])
        yield part

    def _write(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[None]:
        inline_bytes = self._resources.settings.put_inline_bytes
        large = [i for i in indices if len(self._sources[i]) > inline_bytes]
        if large and (node.route.is_local or self._goes_by_engine(node, large)):
            way = self._write_shared if node.route.is_local else self._write_by_engine
            if (yield from way(node, large, busy)):
                indices = [i for i in indices if len(self._sources[i]) <= inline_bytes]
        if indices:
            yield from self._write_inline(node, indices, busy)

    def _goes_by_engine(self, node: KnownNode, indices: list[int]) -> bool:
        """Large batches to other hosts do, unless the node's engine cannot be had."""
        if not self._resources.engine_copies.remote.is_usable(node):
            return False
        return sum(len(self._sources[i]) for i in indices) >= self._resources.settings.engine_min_bytes

    def _write_inline(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[None]:
        """Values go along with one message."""
        sources = [self._sources[i] for i in indices]
        sizes = list(map(len, sources))
        sums = yield from work(lambda: [checksum(source) for source in sources], sum(sizes))
        message = Put(self._namespace, *self._columns(indices), sums, self._parents_of(indices))
        loan, reply = yield from self._resources.daemons.begin(node.route, message, Flags, self._deadline, sources)
        loan.give_back()
        yield from self._ask_again(self._written(node, indices, reply), busy)

    def _write_shared(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[bool]:
        """Values are copied into the node's slabs; False if they cannot be reached from here."""
        message = Open(self._namespace, *self._columns(indices), self._parents_of(indices))
        begun = yield from self._resources.daemons.begin_shared(node.route, message, Opened, self._deadline)
        if begun is None:
            return False
        loan, opened = begun
        try:
            if len(opened.statuses) != len(indices):
                raise ProtocolError(f"node {node.node_id} opened {len(opened.statuses)} puts for {len(indices)} keys")
            again = yield from self._fill_slots(loan, node, indices, opened)
        except BaseException:
            loan.discard()  # the node forgets the puts of a connection that ends
            raise
        loan.give_back()
        yield from self._cancel([i for i, status in zip(indices, opened.statuses, strict=True) if status == PRESENT])
        again += [i for i, status in zip(indices, opened.statuses, strict=True) if status == BUSY]
        yield from self._ask_again(again, busy)
        return True

    def _write_by_engine(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[bool]:
        """The transfer engine writes the values into slots of a node on another host; False if it cannot."""
        resources = self._resources
        message = Open(self._namespace, *self._columns(indices), self._parents_of(indices), 1)
        try:
            peer = yield from resources.engine_copies.peer_of(node)
        except Unreachable as error:
            yield from resources.engine_copies.failed(node, error, self._deadline)
            return False
        loan, opened = yield from resources.daemons.begin(node.route, message, Opened, self._deadline)
        try:
            if not len(opened.statuses) == len(opened.regions) == len(indices):
                raise ProtocolError(f"node {node.node_id} opened {len(opened.statuses)} puts for {len(indices)} keys")
            again = yield from self._fill_regions(loan, node, peer, indices, opened)
        except BaseException as error:
            is_gone = not loan.channel.is_open
            loan.discard()  # the node forgets the puts of a connection that ends
            if is_gone or not isinstance(error, Unreachable):
                raise
            yield from resources.engine_copies.failed(node, error, self._deadline)
            return False
        loan.give_back()
        yield from self._cancel([i for i, status in zip(indices, opened.statuses, strict=True) if status == PRESENT])
        again += [i for i, status in zip(indices, opened.statuses, strict=True) if status == BUSY]
        yield from self._ask_again(again, busy)
        return True

    def _fill_regions(self, loan: AnyLoan, node: KnownNode, peer: Peer, indices: list[int], opened: Opened) -> Operation[list[int]]:
        """Write into the slots' regions and commit; what has to be written again."""
        resources = self._resources
        places = [place for place, status in enumerate(opened.statuses) if status == GRANTED]
        if not places:
            return []
        sources = [self._sources[indices[place]] for place in places]
        copies: list[Copy] = [
            (source, resources.engine_copies.remote.region(peer, opened.regions[place]), len(source))
            for place, source in zip(places, sources, strict=True)
        ]
        yield from resources.engine_copies.move(node, copies, self._deadline)
        sums = yield from work(lambda: [checksum(source) for source in sources], sum(map(len, sources)))
        commit = Commit([opened.put_ids[place] for place in places], sums)
        reply: Flags = yield Ask(loan.channel, commit, Flags, self._deadline)
        return self._written(node, [indices[place] for place in places], reply)

    def _fill_slots(self, loan: AnyLoan, node: KnownNode, indices: list[int], opened: Opened) -> Operation[list[int]]:
        """Copy into the slots and commit; what the node has forgotten meanwhile and must be written again."""
        resources, channel = self._resources, loan.channel
        places = [place for place, status in enumerate(opened.statuses) if status == GRANTED]
        again: list[int] = []
        if opened.ahead:  # first, so that it goes on beside the copies
            yield from resources.mapping.map_ahead(channel, node.node_id, opened.ahead, self._deadline)
        if places:
            wanted = [opened.slabs[place] for place in places]
            slabs = yield from resources.mapping.map_slabs(channel, node.node_id, wanted, self._deadline, writable=True)
            sources = [self._sources[indices[place]] for place in places]
            offsets = [opened.offsets[place] for place in places]
            pairs = [(slab.part(offset, len(source)), source) for slab, offset, source in zip(slabs, offsets, sources, strict=True)]
            sums = yield from work(partial(resources.copier.copy_and_sum, pairs), sum(map(len, sources)))
            commit = Commit([opened.put_ids[place] for place in places], sums)
            reply: Flags = yield Ask(channel, commit, Flags, self._deadline)
            again = self._written(node, [indices[place] for place in places], reply)
        return again

    def _ask_again(self, again: list[int], busy: list[int]) -> Operation[None]:
        """The node had no room for these, or another writer has them there: their reservations go back, for all to ask again."""
        busy += again
        yield from self._cancel(again)

    def _columns(self, indices: Sequence[int]) -> tuple[list[bytes], list[int], list[int]]:
        """Keys, sizes and generations."""
        return [self._keys[i] for i in indices], [len(self._sources[i]) for i in indices], [self._granted[i] for i in indices]

    def _parents_of(self, indices: Sequence[int]) -> list[bytes]:
        return [self._parents[i] for i in indices]

    def _written(self, node: KnownNode, indices: Sequence[int], reply: Flags) -> list[int]:
        """Note the node's answers; the keys to ask again for."""
        hints, again = [], []
        for i, flag in zip(indices, reply.flags, strict=True):
            if flag == ASK_AGAIN:
                again.append(i)
                continue
            generation = self._granted.pop(i)
            if flag == STORED:
                self._stored[i] = True
                hints.append((self._keys[i], Hint(node.node_id, generation, len(self._sources[i]))))
        self._resources.hints.learn(hints)
        return again
