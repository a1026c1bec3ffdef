"""How values are read: which node has each block, one Read to each node, values straight into their destinations, and what to do
when a hint is stale, a node is gone, bytes are damaged or a lease lapsed. Sans-I/O: see effects.py."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from kvstore.client.buffers import Destination, checksum, fresh_bytes
from kvstore.client.effects import AnyChannel, AnyLoan, Fill, Operation, Post, work
from kvstore.client.locations import Hint
from kvstore.client.resources import ClientResources
from kvstore.client.routes import KnownNode
from kvstore.protocol.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    LeaseExpired,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import Locations, Lookup
from kvstore.protocol.node_messages import INLINE, LATER, MAPPED, MISS, Blocks, Read, Release
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.paths.spans import Copy, Span

R = TypeVar("R")
Wanted = tuple[int, Hint]
"""A key's index and where it is."""

ATTEMPTS: Final = 3
"""A hint may be stale, and the node that the master then names may be gone: the third try knows both."""
FAR_HINT_NS: Final = 10 * 1_000_000_000
"""After this long the master is asked again where a block of another host is: copies are made of what is read often."""
RENEW_TIMEOUT_S: Final = 0.25
"""A master that does not answer by then is not worth waiting for: the block is most likely still where it was."""


class Sink(Protocol[R]):
    """Where the values of one operation go, by the index of their key."""

    def room(self, index: int, size_bytes: int) -> memoryview:
        """A writable view of `size_bytes`. Raises InvalidArgument when there is not as much."""

    def done(self, index: int, size_bytes: int) -> None:
        """The value is in its room and is right."""

    def results(self) -> list[R | None]:
        """One a key, None for a miss."""


class FreshBytes:
    """Values become new bytes objects."""

    def __init__(self, count: int) -> None:
        self._values: list[bytes | None] = [None] * count
        self._done: list[bytes | None] = [None] * count

    def room(self, index: int, size_bytes: int) -> memoryview:
        self._values[index], view = fresh_bytes(size_bytes)
        return view

    def done(self, index: int, size_bytes: int) -> None:
        self._done[index] = self._values[index]

    def results(self) -> list[bytes | None]:
        return self._done


class IntoBuffers:
    """Values go to the caller's buffers; the results are sizes."""

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = destinations
        self._sizes: list[int | None] = [None] * len(destinations)

    def room(self, index: int, size_bytes: int) -> memoryview:
        view = self._destinations[index].view
        if len(view) < size_bytes:
            raise InvalidArgument(f"the buffer of key {index} has {len(view)} bytes, its value has {size_bytes}")
        return view[:size_bytes]

    def done(self, index: int, size_bytes: int) -> None:
        finish = self._destinations[index].finish
        if finish is not None:
            finish()
        self._sizes[index] = size_bytes

    def results(self) -> list[int | None]:
        return self._sizes


class Reading(Generic[R]):
    """One get of a batch. Use once: `yield from Reading(...).run()`."""

    def __init__(
        self, resources: ClientResources, keys: Sequence[bytes], sink: Sink[R], deadline: Deadline, clock_ns: Callable[[], int]
    ) -> None:
        self._resources = resources
        self._keys = keys
        self._sink = sink
        self._deadline = self._attempt = deadline
        """Of all, and of the request under way: it leaves time for another replica where there is one."""
        self._clock_ns = clock_ns
        self._begun_ns = deadline.at_ns - int(deadline.timeout_s * 1e9)
        self._inline_bytes = int(resources.settings.get_inline_bytes)
        self._lease_ms = int(resources.settings.read_lease_s * 1000)
        self._again: dict[int, list[int]] = defaultdict(list)
        """Keys to be looked up anew, by the node to avoid (0: none)."""
        self._failures: dict[int, KVStoreError] = {}
        self._refusal: InvalidArgument | None = None
        self._found: set[int] = set()
        self._tiers: dict[int, int] = {}
        self._bytes_in = 0

    def run(self) -> Operation[list[R | None]]:
        """The sink's results. Raises InvalidArgument, ChecksumMismatch, LeaseExpired, Unavailable (no master), DeadlineExceeded.

        After an error the destinations' content is undefined.
        """
        hint = self._resources.hints.find_one(self._keys[0]) if len(self._keys) == 1 else None
        if hint is not None:
            found = {hint.node_id: [(0, hint)]}
        else:
            found = yield from self._find({0: list(range(len(self._keys)))}, self._deadline, from_hints=True)
        if old := self._old(found):
            found = yield from self._renew(found, old)
        for attempt in range(1, ATTEMPTS + 1):
            for node_id, wanted in found.items():
                yield from self._read_from(node_id, wanted)
            again, self._again = self._again, defaultdict(list)
            if not again or attempt == ATTEMPTS:
                break
            self._resources.counters.add(retries=1)
            found = yield from self._find(again, self._deadline, from_hints=False)
        self._resources.counters.read(self._tiers, self._bytes_in, misses=len(self._keys) - len(self._found))
        if self._refusal is not None:
            raise self._refusal
        for index, failure in self._failures.items():
            if index not in self._found:
                raise failure
        return self._sink.results()

    # --- finding ---

    def _find(self, wanted: dict[int, list[int]], deadline: Deadline, *, from_hints: bool) -> Operation[dict[int, list[Wanted]]]:
        """Which node to ask for which keys; keys that nobody has are left out."""
        found: dict[int, list[Wanted]] = {}
        for avoid, indices in wanted.items():
            unknown = indices
            if from_hints:
                hints = self._resources.hints.find([self._keys[i] for i in indices])
                for i, hint in zip(indices, hints, strict=True):
                    if hint is not None:
                        found.setdefault(hint.node_id, []).append((i, hint))
                unknown = [i for i, hint in zip(indices, hints, strict=True) if hint is None]
            for start in range(0, len(unknown), MAX_BATCH):
                part = unknown[start : start + MAX_BATCH]
                reply = yield from self._resources.daemons.ask_master(Lookup([self._keys[i] for i in part], avoid), Locations, deadline)
                if any(reply.replicas) and not self._resources.daemons.nodes.is_known:
                    yield from self._resources.daemons.refresh_nodes(deadline)  # which of them are on this host
                learned = []
                for i, hint in zip(part, self._best(reply, avoid), strict=True):
                    if hint is not None:
                        found.setdefault(hint.node_id, []).append((i, hint))
                        learned.append((self._keys[i], hint))
                self._resources.hints.learn(learned)
        return found

    def _old(self, found: dict[int, list[Wanted]]) -> dict[int, Hint]:
        """What was on another host some time ago: a copy of it may be on this one by now."""
        nodes, until_ns = self._resources.daemons.nodes, self._begun_ns - FAR_HINT_NS
        if not nodes.local_id:
            return {}
        far = (wanted for node_id, wanted in found.items() if not nodes.is_local(node_id))
        return {i: hint for wanted in far for i, hint in wanted if 0 < hint.asked_ns <= until_ns}

    def _renew(self, found: dict[int, list[Wanted]], old: dict[int, Hint]) -> Operation[dict[int, list[Wanted]]]:
        """Ask anew for what is old of `found`. It stays as it was if no master answers soon."""
        try:
            renewed = yield from self._find({0: list(old)}, Deadline(min(RENEW_TIMEOUT_S, self._deadline.left_s())), from_hints=False)
        except (Unavailable, DeadlineExceeded):
            self._resources.hints.learn((self._keys[i], hint._replace(asked_ns=self._begun_ns)) for i, hint in old.items())
            return found
        for node_id, wanted in found.items():
            renewed.setdefault(node_id, []).extend(item for item in wanted if item[0] not in old)
        return {node_id: wanted for node_id, wanted in renewed.items() if wanted}

    def _best(self, reply: Locations, avoid: int) -> Iterator[Hint | None]:
        """For each key the replica to read: on this host if possible, then in the fastest tier, then at the node that this client writes to
        (its slabs are mapped already)."""
        nodes, replica = self._resources.daemons.nodes, 0
        for count, size, generation in zip(reply.replicas, reply.sizes, reply.generations, strict=True):
            best = None
            for at in range(replica, replica + count):
                node_id, tiers = reply.nodes[at], reply.tiers[at]
                if node_id != avoid:
                    rank = (not nodes.is_local(node_id), tiers & -tiers, node_id != nodes.local_id, node_id)
                    best = min(best, rank) if best is not None else rank
            replica += count
            if best is None:
                yield None
            else:
                yield Hint(best[-1], generation, size, self._begun_ns if best[0] and nodes.local_id else 0, count)

    # --- reading ---

    def _read_from(self, node_id: int, wanted: list[Wanted]) -> Operation[None]:
        node = self._resources.daemons.nodes.get(node_id) or (yield from self._resources.daemons.find_node(node_id, self._deadline))
        if node is None:
            self._retry(node_id, wanted)
            return
        for part in self._parts(wanted) if len(wanted) > 1 else (wanted,):
            # The first stands for all: to look at each would cost more than it saves.
            shares = part[0][1].replicas > 1
            self._attempt = Deadline(self._deadline.left_s() / 2) if shares else self._deadline
            try:
                while part:  # noqa: PLW2901
                    part = yield from self._read(node, part)
            except DeadlineExceeded as error:
                if not shares:
                    raise
                self._retry(node_id, [item for item in part if item[1].replicas > 1], error)
                self._retry(0, [item for item in part if item[1].replicas == 1], error)
            except StaleHandle:
                self._retry(node_id, part)
            except Unavailable:
                self._retry((yield from self._resources.daemons.node_to_avoid(node_id, self._deadline)), part)

    def _parts(self, wanted: list[Wanted]) -> Iterator[list[Wanted]]:
        """Cut where a message's values or keys become too many."""
        part: list[Wanted] = []
        left = int(self._resources.settings.frame_bytes)
        for item in wanted:
            if part and (item[1].size_bytes > left or len(part) == MAX_BATCH):
                yield part
                part, left = [], int(self._resources.settings.frame_bytes)
            part.append(item)
            left -= item[1].size_bytes
        yield part

    def _retry(self, avoid: int, wanted: Sequence[Wanted], failure: KVStoreError | None = None) -> None:
        """Look these up anew, elsewhere if possible."""
        self._resources.hints.forget(self._keys[i] for i, _ in wanted)
        self._again[avoid] += [i for i, _ in wanted]
        if failure is not None:
            self._failures.update((i, failure) for i, _ in wanted)

    def _read(self, node: KnownNode, wanted: list[Wanted]) -> Operation[list[Wanted]]:
        """One Read and what it gives; what the node had no room for in its answer and is to be asked again. Raises Unavailable,
        StaleHandle: nothing of it counts."""
        resources, node_id = self._resources, node.node_id
        by_engine = self._goes_by_engine(node, wanted)
        asked_ns = self._clock_ns() if by_engine else 0
        message = Read(
            [self._keys[i] for i, _ in wanted], [hint.generation for _, hint in wanted], self._inline_bytes, self._lease_ms, int(by_engine)
        )
        loan, blocks = yield from resources.daemons.begin(node.route, message, Blocks, self._attempt)
        keep = False
        try:
            if len(blocks.statuses) != len(wanted):
                raise ProtocolError(f"node {node_id} gave {len(blocks.statuses)} blocks for {len(wanted)} keys")
            if INLINE in blocks.statuses:
                yield from self._take_inline(loan.channel, node_id, wanted, blocks)
            if blocks.lease and by_engine and not loan.channel.address.unix:
                yield from self._fetch(loan.channel, node, wanted, blocks, asked_ns + blocks.lease_ms * 1_000_000)
            elif blocks.lease:
                keep = yield from self._take_mapped(loan, node_id, wanted, blocks)
        except BaseException:
            loan.discard()  # with it go the lease and what is left of the payload
            raise
        if not keep:
            loan.give_back()
        if MISS in blocks.statuses:
            missed = [item for item, status in zip(wanted, blocks.statuses, strict=True) if status == MISS]
            resources.counters.add(stale_hints=len(missed))
            self._retry(0, missed)
        if LATER not in blocks.statuses:
            return []
        return [item for item, status in zip(wanted, blocks.statuses, strict=True) if status == LATER]

    def _goes_by_engine(self, node: KnownNode, wanted: list[Wanted]) -> bool:
        """Large batches from other hosts do, unless the node's engine cannot be had."""
        if node.route.is_local or not self._resources.engine_copies.remote.is_usable(node):
            return False
        return sum(hint.size_bytes for _, hint in wanted) >= self._resources.settings.engine_min_bytes

    def _take_inline(self, channel: AnyChannel, node_id: int, wanted: list[Wanted], blocks: Blocks) -> Operation[None]:
        places = [place for place, status in enumerate(blocks.statuses) if status == INLINE]
        views = [self._room(wanted[place][0], blocks.sizes[place]) for place in places]
        # A value that has no room is read all the same: the rest of the batch comes after it.
        yield Fill(
            channel,
            [bytearray_view(blocks.sizes[place]) if view is None else view for view, place in zip(views, places, strict=True)],
            self._attempt,
        )
        total = sum(blocks.sizes[place] for place in places)
        sums = yield from work(lambda: [None if view is None else checksum(view) for view in views], total)
        good: list[int] = []
        damaged: list[int] = []
        for place, found in zip(places, sums, strict=True):
            if found is not None:
                (good if found == blocks.checksums[place] else damaged).append(place)
        self._arrived(wanted, blocks, good)
        if damaged:
            self._resources.counters.add(checksum_failures=len(damaged))
            error = ChecksumMismatch(f"node {node_id} sent a value whose xxh3_64 is not the one recorded")
            self._retry(node_id, [wanted[place] for place in damaged], error)

    def _take_mapped(self, loan: AnyLoan, node_id: int, wanted: list[Wanted], blocks: Blocks) -> Operation[bool]:
        """Copy out of the slabs and release the lease. True if the loan is kept for later."""
        places = [place for place, status in enumerate(blocks.statuses) if status == MAPPED]
        parts = yield from self._parts_of_slabs(loan.channel, node_id, places, blocks)
        rooms = [self._room(wanted[place][0], len(part)) for place, part in zip(places, parts, strict=True)]
        copies = [(room, part) for room, part in zip(rooms, parts, strict=True) if room is not None]
        yield from work(lambda: self._resources.copier.copy(copies), sum(len(part) for _, part in copies))
        in_time = self._clock_ns() < blocks.lease_until_ns
        yield Post(loan.channel, Release([blocks.lease]))
        good = [place for place, room in zip(places, rooms, strict=True) if room is not None]
        if in_time:
            self._arrived(wanted, blocks, good)
        else:
            lapsed = LeaseExpired(f"copying took longer than the lease of {self._lease_ms} ms")
            self._retry(0, [wanted[place] for place in good], lapsed)
        return False

    def _fetch(self, channel: AnyChannel, node: KnownNode, wanted: list[Wanted], blocks: Blocks, until_ns: int) -> Operation[None]:
        """Have the transfer engine read mapped blocks from another host, verify them, and release the lease."""
        resources = self._resources
        places = [place for place, status in enumerate(blocks.statuses) if status == MAPPED]
        try:
            regions = yield from resources.engine_copies.show_slabs(channel, node, [blocks.slabs[place] for place in places], self._attempt)
            rooms = [self._room(wanted[place][0], blocks.sizes[place]) for place in places]
            copies: list[Copy] = [
                (Span(region, blocks.offsets[place]), room, len(room))
                for region, place, room in zip(regions, places, rooms, strict=True)
                if room is not None
            ]
            yield from resources.engine_copies.move(node, copies, self._attempt)
        except (StaleHandle, Unreachable) as error:
            if not channel.is_open:  # it is the node that is gone, not only the way to its engine
                raise
            # Its engine is out of reach, or its slabs have changed: ask anew, and then by message.
            yield Post(channel, Release([blocks.lease]))
            yield from resources.engine_copies.failed(node, error, self._deadline)
            self._retry(0, [wanted[place] for place in places], error)
            return
        moved = [(place, room) for place, room in zip(places, rooms, strict=True) if room is not None]
        sums = yield from work(lambda: [checksum(room) for _, room in moved], sum(len(room) for _, room in moved))
        yield Post(channel, Release([blocks.lease]))
        good = [place for (place, _), found in zip(moved, sums, strict=True) if found == blocks.checksums[place]]
        damaged = [place for (place, _), found in zip(moved, sums, strict=True) if found != blocks.checksums[place]]
        self._arrived(wanted, blocks, good)
        if damaged:
            self._retry_damaged(node, [wanted[place] for place in damaged], is_late=self._clock_ns() >= until_ns)

    def _retry_damaged(self, node: KnownNode, items: list[Wanted], *, is_late: bool) -> None:
        """Values that the engine read came out wrong: overwritten after their lease, or damaged."""
        if is_late:
            self._retry(0, items, LeaseExpired(f"reading took longer than the lease of {self._lease_ms} ms"))
            return
        self._resources.counters.add(checksum_failures=len(items))
        self._retry(node.node_id, items, ChecksumMismatch(f"node {node.node_id} holds a value whose xxh3_64 is not the one recorded"))

    def _parts_of_slabs(self, channel: AnyChannel, node_id: int, places: Sequence[int], blocks: Blocks) -> Operation[list[memoryview]]:
        """The memory of mapped blocks, in order."""
        slabs = yield from self._resources.mapping.map_slabs(
            channel, node_id, [blocks.slabs[place] for place in places], self._attempt, writable=False
        )
        return [slab.part(blocks.offsets[place], blocks.sizes[place]) for slab, place in zip(slabs, places, strict=True)]

    def _room(self, index: int, size_bytes: int) -> memoryview | None:
        try:
            return self._sink.room(index, size_bytes)
        except InvalidArgument as error:
            self._refusal = self._refusal or error
            return None

    def _arrived(self, wanted: list[Wanted], blocks: Blocks, places: Sequence[int]) -> None:
        for place in places:
            size, tier = blocks.sizes[place], blocks.tiers[place]
            self._sink.done(wanted[place][0], size)
            self._tiers[tier] = self._tiers.get(tier, 0) + 1
            self._bytes_in += size
            self._found.add(wanted[place][0])


def bytearray_view(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))
