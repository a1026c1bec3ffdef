"""What nodes answered to the Reads of a get, and how far the get has come: what has arrived, what is to be looked up anew, and what went
wrong."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyLoan
from kvstore.client.memory import Parts
from kvstore.client.reads.replica_lookup import Wanted
from kvstore.client.reads.sinks import Sink
from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, KVStoreError
from kvstore.protocol.node_messages import ReadBlocksReply
from kvstore.rpc.deadline import Deadline


@dataclass(slots=True)
class ReadReply:
    """A place is an index into `wanted` and into each column of `blocks`. The values that come inline are still to be read from the loan's
    channel; the others are there for the length of the lease."""

    node: KnownNode
    loan: AnyLoan
    wanted: list[Wanted]
    blocks: ReadBlocksReply
    deadline: Deadline
    """Of this request."""

    def places(self, status: int) -> list[int]:
        return [place for place, found in enumerate(self.blocks.statuses) if found == status]

    def items(self, places: Iterable[int]) -> list[Wanted]:
        return [self.wanted[place] for place in places]


R = TypeVar("R")


class GetProgress(Generic[R]):
    """Of one get."""

    def __init__(self, resources: ClientResources, keys: Sequence[bytes], sink: Sink[R], deadline: Deadline) -> None:
        self.deadline = deadline
        """For all of it."""
        self._hints = resources.hints
        self._counters = resources.counters
        self._keys = keys
        self._sink = sink
        self._again: dict[int, list[int]] = defaultdict(list)
        """Keys to be looked up anew, by the node to avoid (0: none)."""
        self._failures: dict[int, KVStoreError] = {}
        self._in_the_way: dict[int, KVStoreError] = {}
        """What kept a value from coming by one way, until another is tried."""
        self._refusal: InvalidArgument | None = None
        self._found: set[int] = set()
        self._tiers: dict[int, int] = {}
        self._bytes_in = 0

    def room(self, index: int, size_bytes: int) -> Parts | None:
        """Where the value of a key goes; None when there is not as much room: the get fails then, once all values have been seen."""
        try:
            return self._sink.room(index, size_bytes)
        except InvalidArgument as error:
            self._refusal = self._refusal or error
            return None

    def arrived(self, answer: ReadReply, places: Sequence[int]) -> None:
        """These values are in their rooms, and right."""
        blocks = answer.blocks
        for place in places:
            index, size, tier = answer.wanted[place][0], blocks.sizes[place], blocks.tiers[place]
            self._sink.done(index, size)
            self._tiers[tier] = self._tiers.get(tier, 0) + 1
            self._bytes_in += size
            self._found.add(index)

    def retry(self, avoid: int, wanted: Sequence[Wanted], failure: KVStoreError | None = None) -> None:
        """Look these up anew, elsewhere if possible; `failure` is raised for those that do not arrive after all."""
        self._hints.forget(self._keys[i] for i, _ in wanted)
        self._again[avoid] += [i for i, _ in wanted]
        if failure is not None:
            self._failures.update((i, failure) for i, _ in wanted)

    def retry_otherwise(self, wanted: Sequence[Wanted], failure: KVStoreError) -> None:
        """The way to these failed, which says nothing of the values: `failure` is raised only if there is no other try. By then they may be
        gone."""
        self.retry(0, wanted)
        self._in_the_way.update((i, failure) for i, _ in wanted)

    def retry_stale(self, wanted: Sequence[Wanted]) -> None:
        """The node does not have these."""
        self._counters.add(stale_hints=len(wanted))
        self.retry(0, wanted)

    def retry_damaged(self, node_id: int, wanted: Sequence[Wanted], error: ChecksumMismatch) -> None:
        """The node's values are not what was put."""
        self._counters.add(checksum_failures=len(wanted))
        self.retry(node_id, wanted, error)

    def take_again(self, *, is_last: bool) -> dict[int, list[int]]:
        """What is to be looked up anew, by the node to avoid: nothing after the last try. It is the caller's from here on."""
        again, self._again = self._again, defaultdict(list)
        if is_last:
            self._failures.update(self._in_the_way)
            return {}
        self._in_the_way.clear()
        return again

    def finish(self) -> list[R | None]:
        """The sink's results. Raises InvalidArgument for a value that had no room, and the failure of one that did not arrive, unless the
        sink takes it."""
        self._counters.read(self._tiers, self._bytes_in, misses=len(self._keys) - len(self._found))
        if self._refusal is not None:
            raise self._refusal
        for index, failure in self._failures.items():
            if index not in self._found:
                self._sink.failed(index, failure)
        return self._sink.results()
