"""How values are written: reserve at the master, write to the node it names, and what to do when another writer is at it or a node
is gone. Sans-I/O: see effects.py."""

from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Final

from kvstore.client.connections.partition_requests import places
from kvstore.client.connections.reservations import REFUSALS
from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.buffers import Sources
from kvstore.client.core.effects import GatherEffect, Operation, SleepEffect, work
from kvstore.client.memory import checksum
from kvstore.client.writes.put_batch import UNRESERVED, PutBatch
from kvstore.client.writes.slot_put import SlotPut
from kvstore.protocol.errors import Denied, Draining, KVStoreError, TooManyConnections, Unauthorized, Unavailable, Unreachable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Reserve, ReserveReply
from kvstore.protocol.message import BUSY, GRANTED
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, ACK_NODE_NO_WAIT, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline

FIRST_PAUSE_S: Final = 0.001
MAX_PAUSE_S: Final = 0.05
"""Between questions about a key that another writer holds: doubles from the first to the last."""


class BatchPut:
    """One put of a batch. Use once: `yield from Writing(...).run()`. Keys, sources and parents are equally long."""

    def __init__(
        self,
        resources: ClientResources,
        keys: Sequence[bytes],
        sources: Sources,
        *,
        namespace: str,
        parents: Sequence[bytes | None] | None,
        is_early: bool,
        deadline: Deadline,
    ) -> None:
        """`is_early`: what needs no reservation is stored once its node has it, whatever the master knows."""
        self._is_early = is_early
        self._has_lost = False
        """A node for which the master had made reservations was gone."""
        self._refusal: tuple[str, Unavailable] | None = None
        """Node that could not be reached, and the error: the cause where no other node takes the blocks."""
        self._resources = resources
        self._batch = PutBatch(resources, keys, sources, namespace=namespace, parents=parents)
        self._slots = SlotPut(resources, self._batch, deadline)
        self._deadline = deadline
        self._avoid = 0

    def run(self) -> Operation[list[bool]]:
        """True for each key that this call stored; a key repeated in the batch is stored once.

        Raises Full, Unavailable, DeadlineExceeded (another writer held a key, or a daemon was slow), CatalogUnavailable. Keys written
        before the error stay; reservations of the others are given back.
        """
        resources = self._resources
        keys = self._batch.keys
        pending = list(range(len(keys)))
        if len(set(keys)) < len(keys):
            first: dict[bytes, int] = {}
            for index, key in enumerate(keys):
                first.setdefault(key, index)
            pending = list(first.values())
        try:
            for start in range(0, len(pending), MAX_BATCH):
                yield from self._store(pending[start : start + MAX_BATCH])
        except BaseException as error:
            resources.reservations.unused.append(self._batch)  # first: an interrupt may follow an interrupt
            if isinstance(error, KVStoreError):
                yield from resources.reservations.give_up(self._batch)
            raise
        finally:
            is_stored, sources = self._batch.stored, self._batch.sources
            stored = is_stored.count(True)
            if self._is_early and stored < len(self._batch.keys):
                self._resources.early_puts.had_some()
            out = sources.bytes_of(range(stored)) if sources.flat is not None else sum(compress(sources.sizes, is_stored))
            resources.counters.add(requests=1, puts=stored, already_present=len(self._batch.keys) - stored, bytes_out=out)
        return self._batch.stored

    def results_after(self, error: KVStoreError) -> list[bool | KVStoreError]:
        """What became of each key after `run` raised this."""
        return self._batch.results_after(error)

    def _store(self, pending: list[int]) -> Operation[None]:
        pause_s = FIRST_PAUSE_S
        while True:
            busy: list[int] = []
            lost: list[int] = []
            unreserved, others = yield from self._split(pending)
            if unreserved:
                lost += yield from self._write_to(self._resources.daemons.nodes.local_id, unreserved, busy)
            elif self._is_early:
                others = yield from self._write_to_targets(others)
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
                yield SleepEffect(min(pause_s, self._deadline.left_s()))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _split(self, pending: list[int]) -> Operation[tuple[list[int], list[int]]]:
        """Values for the node on this host that need no reservation, since that node claims them: all of them where it is enough that it
        holds them, else the small ones, which saves a round trip. And the rest."""
        resources = self._resources
        if not resources.daemons.nodes.is_known:
            try:
                yield from resources.daemons.refresh_nodes(self._deadline)
            except Unauthorized:
                raise
            except Denied:
                return [], pending  # the master refuses the reservation, too, with an error that names the put
        local_id = resources.daemons.nodes.local_id
        if not local_id or local_id == self._avoid or local_id in resources.daemons.nodes.closed:
            return [], pending
        sizes, inline_bytes = self._batch.sources.sizes, self._resources.settings.put_inline_bytes
        unreserved = pending if self._is_early else [i for i in pending if sizes[i] <= inline_bytes]
        self._batch.granted.update(dict.fromkeys(unreserved, UNRESERVED))
        if len(unreserved) == len(pending):
            return unreserved, []
        return unreserved, [i for i in pending if sizes[i] > inline_bytes]

    def _write_to_targets(self, pending: list[int]) -> Operation[list[int]]:
        """Write small values to the nodes of other hosts that the master chose a moment ago; the rest, and what these nodes refused."""
        targets, sizes, inline_bytes = self._resources.put_targets, self._batch.sources.sizes, self._resources.settings.put_inline_bytes
        by_node: dict[int, list[int]] = {}
        for i in pending:
            node_id = targets.node_id(sizes[i]) if sizes[i] <= inline_bytes else 0
            by_node.setdefault(node_id, []).append(i)
        left = by_node.pop(0, [])
        for node_id, indices in by_node.items():
            refused = yield from self._write_to_target(node_id, indices)
            if refused:
                targets.forget(node_id)
            left += refused
        return left

    def _write_to_target(self, node_id: int, indices: list[int]) -> Operation[list[int]]:
        """Write without a reservation; the keys that are to be reserved all the same."""
        daemons, granted = self._resources.daemons, self._batch.granted
        node = daemons.nodes.get(node_id)
        if node is None:
            return indices
        refused: list[int] = []
        granted.update(dict.fromkeys(indices, UNRESERVED))
        try:
            for part in self._parts(indices):
                yield from self._write(node, part, refused)
        except REFUSALS as error:
            if isinstance(error, Unreachable):
                self._note_refusal(node_id, error)
                self._avoid = yield from daemons.node_to_avoid(node_id, self._deadline)
            refused += [i for i in indices if i in granted]
        for i in refused:
            granted.pop(i, None)
        return refused

    def _reserve(self, pending: list[int], busy: list[int]) -> Operation[dict[int, list[int]]]:
        """Ask the masters; the granted keys by node."""
        daemons = self._resources.daemons
        found = yield from places(daemons, [self._batch.keys[i] for i in pending], self._deadline)
        parts = {partition: [pending[at] for at in found_at] for partition, found_at in found.items()}
        if len(parts) == 1:
            answers = [(yield from self._ask_for(next(iter(parts)), pending))]
        else:
            answers = yield GatherEffect([self._ask_for(partition, part) for partition, part in parts.items()])
        self._batch.note_grants()
        by_node: dict[int, list[int]] = {}
        for part, reply in zip(parts.values(), answers, strict=True):
            for i, status, node_id in zip(part, reply.statuses, reply.nodes, strict=True):
                if status == GRANTED:
                    by_node.setdefault(node_id, []).append(i)
                elif status == BUSY:
                    busy.append(i)
                else:
                    self._batch.was_there((i,))
        daemons.nodes.closed -= by_node.keys()
        for node_id, indices in by_node.items():
            if not daemons.nodes.is_local(node_id):
                self._resources.put_targets.learn({self._batch.sources.sizes[i] for i in indices}, node_id)
        return by_node

    def _ask_for(self, partition: int, pending: list[int]) -> Operation[ReserveReply]:
        """The partition's master, for keys of it."""
        daemons, batch = self._resources.daemons, self._batch
        reserve = Reserve([batch.keys[i] for i in pending], [batch.sources.sizes[i] for i in pending], daemons.nodes.local_id, self._avoid)
        told: list[ReserveReply] = []
        batch.told.append((pending, told))
        try:
            return (yield from daemons.ask_master(reserve, ReserveReply, self._deadline, note=told.append, partition=partition))
        except Unavailable as error:
            if self._refusal is None:
                raise
            node, cause = self._refusal
            kind = TooManyConnections if isinstance(cause, TooManyConnections) else Unavailable
            raise kind(f"node {node}: {cause}; of the other nodes: {error}") from None

    # --- writing to one node ---

    def _write_to(self, node_id: int, indices: list[int], busy: list[int]) -> Operation[list[int]]:
        """Write these keys; those that are to be reserved elsewhere, because this node is gone or has moved. A second gone is an error."""
        try:
            node = yield from self._resources.daemons.find_node(node_id, self._deadline)
            if node is None and (yield from self._resources.daemons.partitions(self._deadline)) > 1:
                # The owner of partition 0, which names nodes, may have just taken over and not know it yet: asked again after a pause.
                left = [i for i in indices if i in self._batch.granted]
                yield from self._batch.cancel(left)
                busy += left
                return []
            if node is None:
                raise Unavailable(f"node {node_id} is not among the live nodes")
            for part in self._parts(indices):
                yield from self._write(node, part, busy)
        except Draining:
            # The master may not know it yet: then it says once more that the node is to be written to, and a moment later it does not.
            self._resources.daemons.nodes.closed.add(node_id)
            left = [i for i in indices if i in self._batch.granted]
            yield from self._batch.cancel(left)
            if self._avoid:
                busy += left
                return []
            self._avoid = node_id
            return left
        except Unavailable as error:
            if self._has_lost:
                raise
            self._has_lost = True
            self._note_refusal(node_id, error)
            self._avoid = yield from self._resources.daemons.node_to_avoid(node_id, self._deadline)
            lost = [i for i in indices if i in self._batch.granted]
            yield from self._batch.cancel(lost)
            return lost
        return []

    def _note_refusal(self, node_id: int, error: Unavailable) -> None:
        node = self._resources.daemons.nodes.get(node_id)
        self._refusal = repr(node.name) if node is not None else str(node_id), error

    def _parts(self, indices: list[int]) -> Iterator[list[int]]:
        """Cut where one message's values become too many."""
        part: list[int] = []
        sizes, frame_bytes = self._batch.sources.sizes, int(self._resources.settings.frame_bytes)
        if self._batch.sources.bytes_of(indices) <= frame_bytes:
            yield indices
            return
        left = frame_bytes
        for i in indices:
            if part and sizes[i] > left:
                yield part
                part, left = [], frame_bytes
            part.append(i)
            left -= sizes[i]
        yield part

    def _write(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[None]:
        if self._is_kept(indices):
            self._resources.early_puts.begin(node)
        for_slots, inline = self._split_by_size(node, indices)
        if for_slots and node.route.is_local:
            if (yield from self._slots.write_shared(node, for_slots, busy)):
                indices = inline
        elif for_slots and self._goes_by_engine(node, for_slots):
            from kvstore.client.writes.engine_put import EnginePut  # with the transfer engine's modules

            left = yield from EnginePut(self._resources, self._batch, self._deadline).write(node, for_slots, busy)
            indices = sorted(left + inline)
        if indices:
            yield from self._write_inline(node, indices, busy)

    def _split_by_size(self, node: KnownNode, indices: list[int]) -> tuple[list[int], list[int]]:
        """Those whose values are to be written into slots, and those that go along with the message: where the node is on this host a round
        trip more is little beside the way of many small values through a socket."""
        sizes, inline_bytes = self._batch.sources.sizes, self._resources.settings.put_inline_bytes
        if node.route.is_local and self._is_kept(indices) and self._batch.sources.bytes_of(indices) > inline_bytes:
            return indices, []
        large = [i for i in indices if sizes[i] > inline_bytes]
        return large, [i for i in indices if sizes[i] <= inline_bytes] if large else indices

    def _is_kept(self, indices: list[int]) -> bool:
        """These are stored once their node holds them: that is asked for, and nothing has been reserved for them."""
        return self._is_early and self._batch.granted[indices[0]] == UNRESERVED

    def _goes_by_engine(self, node: KnownNode, indices: list[int]) -> bool:
        """Large batches to other hosts do, unless the node's engine cannot be had."""
        if not self._resources.engine_copies.remote.is_usable(node):
            return False
        return self._batch.sources.bytes_of(indices) >= self._resources.settings.engine_min_bytes

    def _write_inline(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[None]:
        """Values go along with one message."""
        sources = [self._batch.sources[i] for i in indices]
        sums = yield from work(lambda: [checksum(parts) for parts in sources], self._batch.sources.bytes_of(indices))
        is_kept = self._is_kept(indices)
        ack = ACK_CLUSTER if not is_kept else ACK_NODE if node.route.is_local else ACK_NODE_NO_WAIT
        message = Put(self._batch.namespace, *self._batch.columns(indices), sums, self._batch.parents_of(indices), ack)
        payload = list(chain.from_iterable(sources))
        loan, reply = yield from self._resources.daemons.begin(node.route, message, Flags, self._deadline, payload)
        instance = loan.channel.welcome.epoch
        loan.release()
        if is_kept:
            self._resources.early_puts.answered(node, instance)
        there, again = self._batch.written(node, indices, reply)
        yield from self._batch.not_written(there, again, busy)
