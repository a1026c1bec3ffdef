"""A get of a batch: one read request per node, with retries for stale locations and failed nodes. Sans-I/O: see
effects.py.

replica_lookup.py finds the locations. Values arrive inline (inline_values.py), in slabs mapped here (mapped_values.py),
or by the transfer engine (engine_fetch.py).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import GatherEffect, Operation
from kvstore.client.reads.inline_values import take_inline
from kvstore.client.reads.mapped_values import KeepLease, MappedUse, OpenView
from kvstore.client.reads.progress import GetProgress, ReadReply
from kvstore.client.reads.replica_lookup import ReplicaLookup, Wanted
from kvstore.client.reads.sinks import FreshBytes, Sink
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, StaleHandle, Unavailable
from kvstore.protocol.frames import MAX_BATCH, MAX_VALUE_BYTES
from kvstore.protocol.node_messages import DEFERRED, INLINE, MAPPED, MISS, ReadBlocks, ReadBlocksReply
from kvstore.rpc.deadline import Deadline

R = TypeVar("R")

ATTEMPTS: Final = 3
"""A cached location may be stale, and the node named by the master may be dead: the third attempt knows both."""

PART_BYTES: Final = 8 << 20
"""Values that one request asks of a node: large against a round trip, and small enough to verify in the processor's
cache. For local nodes it pipelines reads from disk with copies."""
PARTS_AT_ONCE: Final = 2
"""Requests in flight per node: one transferring, one being verified or copied."""


class BatchGet(Generic[R]):
    """One get of a batch. Use once: `yield from BatchGet(...).run()`."""

    def __init__(
        self,
        resources: ClientResources,
        keys: Sequence[bytes],
        sink: Sink[R],
        mapped_use: MappedUse,
        deadline: Deadline,
        clock_ns: Callable[[], int],
    ) -> None:
        self._resources = resources
        self._keys = keys
        self._mapped_use = mapped_use
        self._part_bytes = min(int(resources.settings.frame_bytes), PART_BYTES)
        self._deadline = deadline
        self._clock_ns = clock_ns
        self._progress = GetProgress(resources, keys, sink, deadline)
        self._is_alone = True
        """No other read of this get is in flight."""

    def run(self) -> Operation[list[R | None]]:
        """The sink's results. Raises InvalidArgument, ChecksumMismatch, LeaseExpired, Unavailable (no master),
        DeadlineExceeded.

        After an error the destinations' content is undefined.
        """
        lookup = ReplicaLookup(self._resources, self._keys, self._deadline)
        found = lookup.cached() or (yield from lookup.first())
        for attempt in range(1, ATTEMPTS + 1):
            reads = [read for node_id, wanted in found.items() for read in self._reads(node_id, wanted)]
            self._is_alone = len(reads) == 1
            if self._is_alone:
                yield from reads[0]
            elif reads:
                yield GatherEffect(reads)
            again = self._progress.take_again(is_last=attempt == ATTEMPTS)
            if not again:
                break
            self._resources.counters.add(retries=1)
            found = yield from lookup.find_again(again)
        return self._progress.finish()

    def _reads(self, node_id: int, wanted: list[Wanted]) -> list[Operation[None]]:
        """Reads from one node, in parts: the next part is transferred while one is verified."""
        parts = deque(self._parts(wanted) if len(wanted) > 1 else (wanted,))
        return [self._read_from(node_id, parts) for _ in range(min(PARTS_AT_ONCE, len(parts)))]

    def _read_from(self, node_id: int, parts: deque[list[Wanted]]) -> Operation[None]:
        """Read the remaining `parts` from the node, one after another; several of these run concurrently.

        After a failure of the node the remaining parts are not requested there: each would cost half of the remaining
        time, or a connection attempt.
        """
        daemons, progress = self._resources.daemons, self._progress
        node = daemons.nodes.get(node_id) or (yield from daemons.find_node(node_id, self._deadline))
        while parts:
            part = parts.popleft()
            if node is None:
                progress.retry(node_id, part)
                continue
            # The first key stands for all: checking each would cost more than it saves.
            has_replicas = part[0][1].replicas > 1
            attempt = self._deadline.part(self._deadline.left_s() / 2) if has_replicas else self._deadline
            try:
                while part:
                    part = yield from self._read(node, part, attempt)
            except DeadlineExceeded as error:
                if not has_replicas:
                    self._forget([*part, *self._taken(parts)])
                    raise
                self._retry_elsewhere(node_id, [*part, *self._taken(parts)], error)
            except StaleHandle:
                progress.retry(node_id, part)
            except Unavailable:
                rest = self._taken(parts)
                avoid = yield from daemons.node_to_avoid(node_id, self._deadline)
                progress.retry(avoid, part)
                self._retry_elsewhere(avoid, rest)

    def _taken(self, parts: deque[list[Wanted]]) -> list[Wanted]:
        """Drain parts that may be read elsewhere. Parts with uncommitted puts of this client stay: no other node has
        them."""
        are_all_known = not len(self._resources.uncommitted_puts)
        taken: list[Wanted] = []
        for _ in range(len(parts)):
            part = parts.popleft()
            if are_all_known or all(hint.generation for _, hint in part):
                taken += part
            else:
                parts.append(part)
        return taken

    def _forget(self, wanted: Sequence[Wanted]) -> None:
        """Drop cached locations: the next get asks the master. Locations of uncommitted puts stay, as nothing else
        knows them."""
        are_all_known = not len(self._resources.uncommitted_puts)
        self._resources.hints.forget(self._keys[i] for i, hint in wanted if are_all_known or hint.generation)

    def _retry_elsewhere(self, avoid: int, wanted: Sequence[Wanted], failure: KVStoreError | None = None) -> None:
        """Retry replicated keys on another node, and the others where they are."""
        self._progress.retry(avoid, [item for item in wanted if item[1].replicas > 1], failure)
        self._progress.retry(0, [item for item in wanted if item[1].replicas == 1], failure)

    def _parts(self, wanted: list[Wanted]) -> Iterator[list[Wanted]]:
        """Split where a request's values or keys exceed its limits."""
        part: list[Wanted] = []
        left = self._part_bytes
        for item in wanted:
            if part and (item[1].size_bytes > left or len(part) == MAX_BATCH):
                yield part
                part, left = [], self._part_bytes
            part.append(item)
            left -= item[1].size_bytes
        yield part

    def _read(self, node: KnownNode, wanted: list[Wanted], attempt: Deadline) -> Operation[list[Wanted]]:
        """Send one read request and process its reply; returns keys that did not fit into the reply. `attempt` leaves
        time for another replica.

        Raises Unavailable, StaleHandle: nothing of it counts.
        """
        use, progress = self._mapped_use, self._progress
        fetch = None
        if self._goes_by_engine(node, wanted):
            from kvstore.client.reads.engine_fetch import EngineFetch  # with the transfer engine's modules

            fetch = EngineFetch(self._resources.engine_copies, self._clock_ns, use.lease_ms)
        generations = [hint.generation for _, hint in wanted]
        message = ReadBlocks([self._keys[i] for i, _ in wanted], generations, use.inline_bytes, use.lease_ms, int(fetch is not None))
        connection, blocks = yield from self._resources.daemons.begin(node.route, message, ReadBlocksReply, attempt)
        keep = False
        try:
            if len(blocks.statuses) != len(wanted):
                raise ProtocolError(f"node {node.node_id} gave {len(blocks.statuses)} blocks for {len(wanted)} keys")
            answer = ReadReply(node, connection, wanted, blocks, attempt)
            if INLINE in blocks.statuses:
                yield from take_inline(answer, progress)
            if blocks.lease and fetch is not None and not connection.channel.address.unix:
                yield from fetch.run(answer, progress, is_alone=self._is_alone)
            elif blocks.lease:
                positions = answer.positions(MAPPED)
                memory = yield from self._memory(answer, positions)
                keep = yield from use.use(answer, positions, memory, progress)
        except BaseException:
            connection.discard()  # ends the lease and drops the unread payload
            raise
        if not keep:
            connection.release()
        if MISS in blocks.statuses:
            progress.retry_stale(answer.items(answer.positions(MISS)))
        return answer.items(answer.positions(DEFERRED)) if DEFERRED in blocks.statuses else []

    def _goes_by_engine(self, node: KnownNode, wanted: list[Wanted]) -> bool:
        """Return whether the transfer engine reads them: large batches of remote nodes with a usable engine."""
        if node.route.is_local or not self._resources.engine_copies.remote.is_usable(node):
            return False
        return sum(hint.size_bytes for _, hint in wanted) >= self._resources.settings.engine_min_bytes

    def _memory(self, answer: ReadReply, positions: Sequence[int]) -> Operation[list[memoryview]]:
        """Memory of mapped blocks, in order."""
        blocks, wanted = answer.blocks, [answer.blocks.slabs[position] for position in positions]
        mapping, channel = self._resources.mapping, answer.connection.channel
        slabs = yield from mapping.map_slabs(channel, answer.node.node_id, wanted, answer.deadline, writable=False)
        return [slab.part(blocks.offsets[position], blocks.sizes[position]) for slab, position in zip(slabs, positions, strict=True)]


def open_view(resources: ClientResources, key: bytes, deadline: Deadline, clock_ns: Callable[[], int]) -> Operation[OpenView | None]:
    """A view of one value; None on a miss. Raises as `BatchGet.run`."""
    settings = resources.settings
    keep = KeepLease(int(settings.view_lease_s * 1000), verify_bytes=MAX_VALUE_BYTES if settings.verify_all else 0)
    [value] = yield from BatchGet(resources, [key], FreshBytes(1), keep, deadline, clock_ns).run()
    if keep.view is not None:
        return keep.view
    return None if value is None else OpenView(memoryview(value))
