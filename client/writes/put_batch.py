"""State of one put: its values, their reservations and what is stored, so that the rest can be cancelled at any
time."""

from collections.abc import Sequence
from itertools import compress
from typing import Final

from kvstore.client.connections.locations import CachedLocation
from kvstore.client.connections.resources import ClientResources
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.buffers import Sources
from kvstore.client.core.effects import Operation
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.master_messages import CancelReservations, ReserveReply
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import RETRY_LATER, STORED
from kvstore.protocol.session_messages import Flags

UNRESERVED: Final = 0
"""Generation of a value that the node reserves itself. In a cached location it matches any generation."""


class PutBatch:
    """Keys, values and state of one put. Keys, sources and parents are equally long."""

    def __init__(
        self,
        resources: ClientResources,
        keys: Sequence[bytes],
        sources: Sources,
        *,
        namespace: str,
        parents: Sequence[bytes | None] | None,
    ) -> None:
        self._hints = resources.hints
        self._reservations = resources.reservations
        self.keys = keys
        self.sources = sources
        self.namespace = namespace
        self._parents = [parent or b"" for parent in parents] if parents is not None else [b""] * len(keys)
        self._all = list(range(len(keys)))
        self.stored = [False] * len(keys)
        self._there: set[bytes] = set()
        """Keys found to be stored by others."""
        self.granted: dict[int, int] = {}
        """Generations reserved and not yet written, by key index."""
        self.replies: list[tuple[Sequence[int], list[ReserveReply]]] = []
        """(key indexes, reply) of reservations, from the reply's arrival until `note_grants` has processed it."""

    def note_grants(self) -> None:
        """Move the reservations of all replies into `granted`."""
        for asked, replies in self.replies:
            for reply in replies:
                granted = zip(asked, reply.statuses, reply.generations, strict=True)
                self.granted.update({i: generation for i, status, generation in granted if status == GRANTED})
        self.replies.clear()

    def was_there(self, indices: Sequence[int]) -> None:
        """Others have stored these."""
        self._there.update([self.keys[i] for i in indices])

    def results_after(self, error: KVStoreError) -> list[bool | KVStoreError]:
        """Result of each key after an error: the error, for keys that are not stored."""
        there = self._there.union(compress(self.keys, self.stored))
        return [is_stored or (False if key in there else error) for key, is_stored in zip(self.keys, self.stored, strict=True)]

    def cancel(self, indices: Sequence[int]) -> Operation[None]:
        """Cancel reservations, as far as the master can be reached."""
        yield from self._reservations.cancel(self._cancellation(indices))
        for i in indices:
            self.granted.pop(i, None)

    def _cancellation(self, indices: Sequence[int]) -> CancelReservations:
        granted = [(i, self.granted[i]) for i in indices if self.granted.get(i, UNRESERVED) != UNRESERVED]
        return CancelReservations([self.keys[i] for i, _ in granted], [generation for _, generation in granted])

    def unused(self) -> CancelReservations:
        """The request that cancels all unused reservations of a finished put."""
        self.note_grants()
        return self._cancellation(list(self.granted))

    def not_written(self, there: Sequence[int], again: Sequence[int], busy: list[int]) -> Operation[None]:
        """Process keys that were not written: `there` is stored by others, `again` is to be retried. Both reservations
        are cancelled; one left behind would block the next put of a removed key."""
        self.was_there(there)
        busy += again
        yield from self.cancel([*there, *again])

    def columns(self, indices: Sequence[int]) -> tuple[list[bytes], list[int], list[int]]:
        """Keys, sizes and generations of these indexes."""
        sizes, granted = self.sources.sizes, self.granted
        if self._are_all(indices):
            return list(self.keys), list(sizes), list(map(granted.__getitem__, indices))
        return [self.keys[i] for i in indices], [sizes[i] for i in indices], [granted[i] for i in indices]

    def parents_of(self, indices: Sequence[int]) -> list[bytes]:
        if self._are_all(indices):
            return self._parents
        return [self._parents[i] for i in indices]

    def _are_all(self, indices: Sequence[int]) -> bool:
        """Return whether these are all keys, in order."""
        return len(indices) == len(self.keys) and indices == self._all

    def written(self, node: KnownNode, indices: Sequence[int], reply: Flags) -> tuple[list[int], list[int]]:
        """Record the keys that the node has stored; returns the others for `not_written`: (present, to retry)."""
        hints: list[tuple[bytes, CachedLocation]] = []
        there: list[int] = []
        again: list[int] = []
        keys, sizes, node_id, pop = self.keys, self.sources.sizes, node.node_id, self.granted.pop
        if reply.flags.count(STORED) == len(indices) == len(reply.flags) and len(set(map(sizes.__getitem__, indices))) == 1:
            generations = set(map(self.granted.__getitem__, indices))
            if len(generations) == 1:  # the common case, and much faster
                hint = CachedLocation(node_id, generations.pop(), sizes[indices[0]])
                if len(indices) == len(keys):  # the keys are distinct, or some would be missing
                    self.stored[:] = [True] * len(keys)
                    self.granted.clear()
                    self._hints.learn_all(keys, hint)
                    return there, again
                for i in indices:
                    self.stored[i] = True
                    pop(i)
                self._hints.learn_all([keys[i] for i in indices], hint)
                return there, again
        for i, flag in zip(indices, reply.flags, strict=True):
            if flag == RETRY_LATER:
                again.append(i)
            elif flag == STORED:
                self.stored[i] = True
                hints.append((keys[i], CachedLocation(node_id, pop(i), sizes[i])))
            else:
                there.append(i)
        self._hints.learn(hints)
        return there, again
