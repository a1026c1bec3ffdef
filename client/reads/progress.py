"""State of a get: replies of nodes, values that have arrived, keys to look up again, and errors."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyConnectionLease
from kvstore.client.memory import Parts
from kvstore.client.reads.replica_lookup import Wanted
from kvstore.client.reads.sinks import Sink
from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, KVStoreError
from kvstore.protocol.node_messages import ReadBlocksReply
from kvstore.rpc.deadline import Deadline


@dataclass(slots=True)
class ReadReply:
    """Reply to one read request. A position indexes `wanted` and each column of `blocks`. Inline values are still to be
    read from the channel; mapped ones are valid for the lease."""

    node: KnownNode
    connection: AnyConnectionLease
    wanted: list[Wanted]
    blocks: ReadBlocksReply
    deadline: Deadline
    """Deadline of this request."""

    def positions(self, status: int) -> list[int]:
        return [position for position, found in enumerate(self.blocks.statuses) if found == status]

    def items(self, positions: Iterable[int]) -> list[Wanted]:
        return [self.wanted[position] for position in positions]


R = TypeVar("R")


class GetProgress(Generic[R]):
    """Progress of one get."""

    def __init__(self, resources: ClientResources, keys: Sequence[bytes], sink: Sink[R], deadline: Deadline) -> None:
        self.deadline = deadline
        """Deadline of the whole get."""
        self._hints = resources.hints
        self._counters = resources.counters
        self._keys = keys
        self._sink = sink
        self._again: dict[int, list[int]] = defaultdict(list)
        """Keys to look up again, by the node to avoid (0: none)."""
        self._failures: dict[int, KVStoreError] = {}
        self._transport_failures: dict[int, KVStoreError] = {}
        """Errors of one transport, raised only if no other attempt follows."""
        self._refusal: InvalidArgument | None = None
        self._found: set[int] = set()
        self._tiers: dict[int, int] = {}
        self._bytes_in = 0

    def buffer(self, index: int, size_bytes: int) -> Parts | None:
        """Buffer for a key's value; None if it is too small: the get then fails after all values have been
        processed."""
        try:
            return self._sink.buffer(index, size_bytes)
        except InvalidArgument as error:
            self._refusal = self._refusal or error
            return None

    def arrived(self, answer: ReadReply, positions: Sequence[int]) -> None:
        """These values are in their buffers, verified."""
        blocks = answer.blocks
        for position in positions:
            index, size, tier = answer.wanted[position][0], blocks.sizes[position], blocks.tiers[position]
            self._sink.done(index, size)
            self._tiers[tier] = self._tiers.get(tier, 0) + 1
            self._bytes_in += size
            self._found.add(index)

    def retry(self, avoid: int, wanted: Sequence[Wanted], failure: KVStoreError | None = None) -> None:
        """Look these up again, avoiding a node; `failure` is raised for those that never arrive."""
        self._hints.forget(self._keys[i] for i, _ in wanted)
        self._again[avoid] += [i for i, _ in wanted]
        if failure is not None:
            self._failures.update((i, failure) for i, _ in wanted)

    def retry_otherwise(self, wanted: Sequence[Wanted], failure: KVStoreError) -> None:
        """Retry values whose transport failed. `failure` is raised only without a further attempt: by then the values
        may be evicted."""
        self.retry(0, wanted)
        self._transport_failures.update((i, failure) for i, _ in wanted)

    def retry_stale(self, wanted: Sequence[Wanted]) -> None:
        """Retry values that the node does not have."""
        self._counters.add(stale_hints=len(wanted))
        self.retry(0, wanted)

    def retry_damaged(self, node_id: int, wanted: Sequence[Wanted], error: ChecksumMismatch) -> None:
        """Retry values that fail verification, avoiding the node."""
        self._counters.add(checksum_failures=len(wanted))
        self.retry(node_id, wanted, error)

    def take_again(self, *, is_last: bool) -> dict[int, list[int]]:
        """Drain the keys to look up again, by the node to avoid; {} after the last attempt."""
        again, self._again = self._again, defaultdict(list)
        if is_last:
            self._failures.update(self._transport_failures)
            return {}
        self._transport_failures.clear()
        return again

    def finish(self) -> list[R | None]:
        """The sink's results. Raises InvalidArgument for a value that did not fit, and the error of one that did not
        arrive, unless the sink keeps it."""
        self._counters.read(self._tiers, self._bytes_in, misses=len(self._keys) - len(self._found))
        if self._refusal is not None:
            raise self._refusal
        for index, failure in self._failures.items():
            if index not in self._found:
                self._sink.failed(index, failure)
        return self._sink.results()
