"""How values are read: one Read to each node that has some, and what to do when a hint is stale, a node is gone or does not answer.
Sans-I/O: see effects.py.

Where the keys are is found by replica_lookup.py. What is done with the values depends on how they come: inline.py, mapped_values.py,
fetching.py.
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
"""A hint may be stale, and the node that the master then names may be gone: the third try knows both."""

PART_BYTES: Final = 8 << 20
"""Of values that one message asks of a node: long beside a round trip, and in the processor's cache when it is verified. This host's node
is asked for what lies below DRAM: the disk reads one part while another is copied."""
PARTS_AT_ONCE: Final = 2
"""Asked of one node: one on its way, one being verified or copied."""


class BatchGet(Generic[R]):
    """One get of a batch. Use once: `yield from Reading(...).run()`."""

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
        """Nothing is read beside what is being read."""

    def run(self) -> Operation[list[R | None]]:
        """The sink's results. Raises InvalidArgument, ChecksumMismatch, LeaseExpired, Unavailable (no master), DeadlineExceeded.

        After an error the destinations' content is undefined.
        """
        finding = ReplicaLookup(self._resources, self._keys, self._deadline)
        found = finding.known() or (yield from finding.first())
        for attempt in range(1, ATTEMPTS + 1):
            lanes = [lane for node_id, wanted in found.items() for lane in self._lanes(node_id, wanted)]
            self._is_alone = len(lanes) == 1
            if self._is_alone:
                yield from lanes[0]
            elif lanes:
                yield GatherEffect(lanes)
            again = self._progress.take_again(is_last=attempt == ATTEMPTS)
            if not again:
                break
            self._resources.counters.add(retries=1)
            found = yield from finding.anew(again)
        return self._progress.finish()

    def _lanes(self, node_id: int, wanted: list[Wanted]) -> list[Operation[None]]:
        """What is read from one node, in parts: while one is verified the next is on its way."""
        parts = deque(self._parts(wanted) if len(wanted) > 1 else (wanted,))
        return [self._read_from(node_id, parts) for _ in range(min(PARTS_AT_ONCE, len(parts)))]

    def _read_from(self, node_id: int, parts: deque[list[Wanted]]) -> Operation[None]:
        """Read from the node what is left of `parts`, one after another. Several may do so at once. Once the node has failed one, it is
        asked for none of the others: each would take half of the time that is left, or the time of a connection in vain."""
        daemons, progress = self._resources.daemons, self._progress
        node = daemons.nodes.get(node_id) or (yield from daemons.find_node(node_id, self._deadline))
        while parts:
            part = parts.popleft()
            if node is None:
                progress.retry(node_id, part)
                continue
            # The first stands for all: to look at each would cost more than it saves.
            shares = part[0][1].replicas > 1
            attempt = self._deadline.part(self._deadline.left_s() / 2) if shares else self._deadline
            try:
                while part:
                    part = yield from self._read(node, part, attempt)
            except DeadlineExceeded as error:
                if not shares:
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
        """What is left of them, not to be read from there: all but parts of which the cluster may not know yet, for this client put them
        early."""
        are_all_known = not len(self._resources.early_puts)
        taken: list[Wanted] = []
        for _ in range(len(parts)):
            part = parts.popleft()
            if are_all_known or all(hint.generation for _, hint in part):
                taken += part
            else:
                parts.append(part)
        return taken

    def _forget(self, wanted: Sequence[Wanted]) -> None:
        """Another node may have these since their hints were learned: the next get asks the master. Of what this client put early the hint
        may be all that tells."""
        are_all_known = not len(self._resources.early_puts)
        self._resources.hints.forget(self._keys[i] for i, hint in wanted if are_all_known or hint.generation)

    def _retry_elsewhere(self, avoid: int, wanted: Sequence[Wanted], failure: KVStoreError | None = None) -> None:
        """What has another replica there, and the rest once more where it is."""
        self._progress.retry(avoid, [item for item in wanted if item[1].replicas > 1], failure)
        self._progress.retry(0, [item for item in wanted if item[1].replicas == 1], failure)

    def _parts(self, wanted: list[Wanted]) -> Iterator[list[Wanted]]:
        """Cut where a message's values or keys become too many, and where parts can overlap."""
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
        """One Read and what it gives; what the node had no room for in its answer and is to be asked again. `attempt` leaves time for
        another replica where there is one. Raises Unavailable, StaleHandle: nothing of it counts."""
        use, progress = self._mapped_use, self._progress
        fetch = None
        if self._goes_by_engine(node, wanted):
            from kvstore.client.reads.engine_fetch import EngineFetch  # with the transfer engine's modules

            fetch = EngineFetch(self._resources.engine_copies, self._clock_ns, use.lease_ms)
        generations = [hint.generation for _, hint in wanted]
        message = ReadBlocks([self._keys[i] for i, _ in wanted], generations, use.inline_bytes, use.lease_ms, int(fetch is not None))
        loan, blocks = yield from self._resources.daemons.begin(node.route, message, ReadBlocksReply, attempt)
        keep = False
        try:
            if len(blocks.statuses) != len(wanted):
                raise ProtocolError(f"node {node.node_id} gave {len(blocks.statuses)} blocks for {len(wanted)} keys")
            answer = ReadReply(node, loan, wanted, blocks, attempt)
            if INLINE in blocks.statuses:
                yield from take_inline(answer, progress)
            if blocks.lease and fetch is not None and not loan.channel.address.unix:
                yield from fetch.run(answer, progress, is_alone=self._is_alone)
            elif blocks.lease:
                places = answer.places(MAPPED)
                memory = yield from self._memory(answer, places)
                keep = yield from use.use(answer, places, memory, progress)
        except BaseException:
            loan.discard()  # with it go the lease and what is left of the payload
            raise
        if not keep:
            loan.release()
        if MISS in blocks.statuses:
            progress.retry_stale(answer.items(answer.places(MISS)))
        return answer.items(answer.places(DEFERRED)) if DEFERRED in blocks.statuses else []

    def _goes_by_engine(self, node: KnownNode, wanted: list[Wanted]) -> bool:
        """Large batches from other hosts do, unless the node's engine cannot be had."""
        if node.route.is_local or not self._resources.engine_copies.remote.is_usable(node):
            return False
        return sum(hint.size_bytes for _, hint in wanted) >= self._resources.settings.engine_min_bytes

    def _memory(self, answer: ReadReply, places: Sequence[int]) -> Operation[list[memoryview]]:
        """The memory of mapped blocks, in order."""
        blocks, wanted = answer.blocks, [answer.blocks.slabs[place] for place in places]
        mapping, channel = self._resources.mapping, answer.loan.channel
        slabs = yield from mapping.map_slabs(channel, answer.node.node_id, wanted, answer.deadline, writable=False)
        return [slab.part(blocks.offsets[place], blocks.sizes[place]) for slab, place in zip(slabs, places, strict=True)]


def open_view(resources: ClientResources, key: bytes, deadline: Deadline, clock_ns: Callable[[], int]) -> Operation[OpenView | None]:
    """None on a miss. Raises as Reading.run does."""
    settings = resources.settings
    keep = KeepLease(int(settings.view_lease_s * 1000), verify_bytes=MAX_VALUE_BYTES if settings.verify_all else 0)
    [value] = yield from BatchGet(resources, [key], FreshBytes(1), keep, deadline, clock_ns).run()
    if keep.view is not None:
        return keep.view
    return None if value is None else OpenView(memoryview(value))
