"""A put of a batch: reserve at the master, write to the node it names, and retry when another writer is busy or a node
died. Sans-I/O: see effects.py."""

from collections.abc import Iterator, Sequence
from itertools import chain, compress
from typing import Final

from kvstore.client.connections.partition_requests import split_by_partition
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
"""Pause before a key that another writer has reserved is tried again; doubles from the first to the last."""


class BatchPut:
    """One put of a batch. Use once: `yield from BatchPut(...).run()`. Keys, sources and parents are equally long."""

    def __init__(
        self,
        resources: ClientResources,
        keys: Sequence[bytes],
        sources: Sources,
        *,
        namespace: str,
        parents: Sequence[bytes | None] | None,
        acks_at_node: bool,
        deadline: Deadline,
    ) -> None:
        """`acks_at_node`: an unreserved value is stored once its node holds it, before the directory commits it."""
        self._acks_at_node = acks_at_node
        self._has_lost = False
        """A node with reservations of this put was lost."""
        self._refusal: tuple[str, Unavailable] | None = None
        """(node, error) of an unreachable node: the cause, if no other node takes the blocks."""
        self._resources = resources
        self._batch = PutBatch(resources, keys, sources, namespace=namespace, parents=parents)
        self._slots = SlotPut(resources, self._batch, deadline)
        self._deadline = deadline
        self._avoid = 0

    def run(self) -> Operation[list[bool]]:
        """True for each key that this call stored; a repeated key is stored once.

        Raises Full, Unavailable, DeadlineExceeded (another writer's reservation, or a slow daemon), CatalogUnavailable.
        Keys written before the error stay; other reservations are cancelled.
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
            resources.reservations.unused.append(self._batch)  # first, because a second interrupt may follow
            if isinstance(error, KVStoreError):
                yield from resources.reservations.give_up(self._batch)
            raise
        finally:
            is_stored, sources = self._batch.stored, self._batch.sources
            stored = is_stored.count(True)
            if self._acks_at_node and stored < len(self._batch.keys):
                self._resources.uncommitted_puts.note_already_present()
            out = sources.bytes_of(range(stored)) if sources.flat is not None else sum(compress(sources.sizes, is_stored))
            resources.counters.add(requests=1, puts=stored, already_present=len(self._batch.keys) - stored, bytes_out=out)
        return self._batch.stored

    def results_after(self, error: KVStoreError) -> list[bool | KVStoreError]:
        """Result of each key after `run` raised this error."""
        return self._batch.results_after(error)

    def _store(self, pending: list[int]) -> Operation[None]:
        pause_s = FIRST_PAUSE_S
        while True:
            busy: list[int] = []
            lost: list[int] = []
            unreserved, others = yield from self._split(pending)
            if unreserved:
                lost += yield from self._write_to(self._resources.daemons.nodes.local_id, unreserved, busy)
            elif self._acks_at_node:
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
        """Split into values that the local node takes without a reservation, and the rest.

        With `acks_at_node` all values are unreserved; otherwise small ones are, which saves a round trip.
        """
        resources = self._resources
        if not resources.daemons.nodes.is_known:
            try:
                yield from resources.daemons.refresh_nodes(self._deadline)
            except Unauthorized:
                raise
            except Denied:
                return [], pending  # the master will refuse the reservation with an error that names the put
        local_id = resources.daemons.nodes.local_id
        if not local_id or local_id == self._avoid or local_id in resources.daemons.nodes.closed:
            return [], pending
        sizes, inline_bytes = self._batch.sources.sizes, self._resources.settings.put_inline_bytes
        unreserved = pending if self._acks_at_node else [i for i in pending if sizes[i] <= inline_bytes]
        self._batch.granted.update(dict.fromkeys(unreserved, UNRESERVED))
        if len(unreserved) == len(pending):
            return unreserved, []
        return unreserved, [i for i in pending if sizes[i] > inline_bytes]

    def _write_to_targets(self, pending: list[int]) -> Operation[list[int]]:
        """Write small values to remote target nodes, unreserved; returns the rest and what these nodes refused."""
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
        """Write unreserved values; returns the keys that need a reservation."""
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
        """Reserve at the masters: the granted keys by node."""
        daemons = self._resources.daemons
        found = yield from split_by_partition(daemons, [self._batch.keys[i] for i in pending], self._deadline)
        parts = {partition: [pending[at] for at in found_at] for partition, found_at in found.items()}
        if len(parts) == 1:
            answers = [(yield from self._reserve_part(next(iter(parts)), pending))]
        else:
            answers = yield GatherEffect([self._reserve_part(partition, part) for partition, part in parts.items()])
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

    def _reserve_part(self, partition: int, pending: list[int]) -> Operation[ReserveReply]:
        """Reserve keys of one partition at its master."""
        daemons, batch = self._resources.daemons, self._batch
        reserve = Reserve([batch.keys[i] for i in pending], [batch.sources.sizes[i] for i in pending], daemons.nodes.local_id, self._avoid)
        replies: list[ReserveReply] = []
        batch.replies.append((pending, replies))
        try:
            return (yield from daemons.call_master(reserve, ReserveReply, self._deadline, note=replies.append, partition=partition))
        except Unavailable as error:
            if self._refusal is None:
                raise
            node, cause = self._refusal
            kind = TooManyConnections if isinstance(cause, TooManyConnections) else Unavailable
            raise kind(f"node {node}: {cause}; of the other nodes: {error}") from None

    # --- writing to one node ---

    def _write_to(self, node_id: int, indices: list[int], busy: list[int]) -> Operation[list[int]]:
        """Write these keys; returns those to reserve elsewhere, because the node is dead, draining or moved. A second
        lost node is an error."""
        try:
            node = yield from self._resources.daemons.find_node(node_id, self._deadline)
            if node is None and (yield from self._resources.daemons.partitions(self._deadline)) > 1:
                # A new owner of partition 0, which names nodes, may not know this node yet: retried after a pause.
                left = [i for i in indices if i in self._batch.granted]
                yield from self._batch.cancel(left)
                busy += left
                return []
            if node is None:
                raise Unavailable(f"node {node_id} is not among the live nodes")
            for part in self._parts(indices):
                yield from self._write(node, part, busy)
        except Draining:
            # The master may not know of the drain yet: it may name this node once more, until it does.
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
        """Split where one message's values exceed its limit."""
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
        if self._is_acked_by_node(indices):
            self._resources.uncommitted_puts.begin(node)
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
        """Values to write into slots, and values to send with the message. On a local node many small values use slots
        too: a further round trip costs less than the socket."""
        sizes, inline_bytes = self._batch.sources.sizes, self._resources.settings.put_inline_bytes
        if node.route.is_local and self._is_acked_by_node(indices) and self._batch.sources.bytes_of(indices) > inline_bytes:
            return indices, []
        large = [i for i in indices if sizes[i] > inline_bytes]
        return large, [i for i in indices if sizes[i] <= inline_bytes] if large else indices

    def _is_acked_by_node(self, indices: list[int]) -> bool:
        """Return whether these are acknowledged by the node: requested, and unreserved."""
        return self._acks_at_node and self._batch.granted[indices[0]] == UNRESERVED

    def _goes_by_engine(self, node: KnownNode, indices: list[int]) -> bool:
        """Return whether the transfer engine writes them: large batches to remote nodes with a usable engine."""
        if not self._resources.engine_copies.remote.is_usable(node):
            return False
        return self._batch.sources.bytes_of(indices) >= self._resources.settings.engine_min_bytes

    def _write_inline(self, node: KnownNode, indices: list[int], busy: list[int]) -> Operation[None]:
        """Send values with one message."""
        sources = [self._batch.sources[i] for i in indices]
        sums = yield from work(lambda: [checksum(parts) for parts in sources], self._batch.sources.bytes_of(indices))
        is_node_ack = self._is_acked_by_node(indices)
        ack = ACK_CLUSTER if not is_node_ack else ACK_NODE if node.route.is_local else ACK_NODE_NO_WAIT
        message = Put(self._batch.namespace, *self._batch.columns(indices), sums, self._batch.parents_of(indices), ack)
        payload = list(chain.from_iterable(sources))
        connection, reply = yield from self._resources.daemons.begin(node.route, message, Flags, self._deadline, payload)
        instance = connection.channel.welcome.epoch
        connection.release()
        if is_node_ack:
            self._resources.uncommitted_puts.answered(node, instance)
        there, again = self._batch.written(node, indices, reply)
        yield from self._batch.not_written(there, again, busy)
