"""The batch of one put: its values, what is reserved for them and what is stored, so that the rest can be given back at any time."""

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
"""Generation of a value that the node is to claim at the master. As a hint's it means any."""


class PutBatch:
    """Keys, sources and parents are equally long."""

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
        """Keys that others have stored, as far as they were asked for."""
        self.granted: dict[int, int] = {}
        """Generations reserved for this operation and not yet written, by the key's index."""
        self.told: list[tuple[Sequence[int], list[ReserveReply]]] = []
        """What was asked for of a master, and its answer, from its arrival until `granted` has what it says."""

    def note_grants(self) -> None:
        for asked, replies in self.told:
            for reply in replies:
                granted = zip(asked, reply.statuses, reply.generations, strict=True)
                self.granted.update({i: generation for i, status, generation in granted if status == GRANTED})
        self.told.clear()

    def was_there(self, indices: Sequence[int]) -> None:
        """Others have stored these."""
        self._there.update([self.keys[i] for i in indices])

    def results_after(self, error: KVStoreError) -> list[bool | KVStoreError]:
        """What became of each key of an operation that ended with an error: it is the result of those that nobody has stored."""
        there = self._there.union(compress(self.keys, self.stored))
        return [is_stored or (False if key in there else error) for key, is_stored in zip(self.keys, self.stored, strict=True)]

    def cancel(self, indices: Sequence[int]) -> Operation[None]:
        """Give reservations back, as far as the master can be told."""
        yield from self._reservations.cancel(self._cancellation(indices))
        for i in indices:
            self.granted.pop(i, None)

    def _cancellation(self, indices: Sequence[int]) -> CancelReservations:
        granted = [(i, self.granted[i]) for i in indices if self.granted.get(i, UNRESERVED) != UNRESERVED]
        return CancelReservations([self.keys[i] for i, _ in granted], [generation for _, generation in granted])

    def unused(self) -> CancelReservations:
        """What gives back all that was reserved and not used. For an operation that is over."""
        self.note_grants()
        return self._cancellation(list(self.granted))

    def not_written(self, there: Sequence[int], again: Sequence[int], busy: list[int]) -> Operation[None]:
        """Others have stored `there` at the node; for `again` it had no room, or another writer has them. The reservations of both go back:
        those of `there` would hold up whoever puts such a key anew once its block is removed."""
        self.was_there(there)
        busy += again
        yield from self.cancel([*there, *again])

    def columns(self, indices: Sequence[int]) -> tuple[list[bytes], list[int], list[int]]:
        """Keys, sizes and generations."""
        sizes, granted = self.sources.sizes, self.granted
        if self._are_all(indices):
            return list(self.keys), list(sizes), list(map(granted.__getitem__, indices))
        return [self.keys[i] for i in indices], [sizes[i] for i in indices], [granted[i] for i in indices]

    def parents_of(self, indices: Sequence[int]) -> list[bytes]:
        if self._are_all(indices):
            return self._parents
        return [self._parents[i] for i in indices]

    def _are_all(self, indices: Sequence[int]) -> bool:
        """Whether these are all keys, in order."""
        return len(indices) == len(self.keys) and indices == self._all

    def written(self, node: KnownNode, indices: Sequence[int], reply: Flags) -> tuple[list[int], list[int]]:
        """Note what the node has stored; the others, for `not_written`: those that were there, and those to ask again for."""
        hints: list[tuple[bytes, CachedLocation]] = []
        there: list[int] = []
        again: list[int] = []
        keys, sizes, node_id, pop = self.keys, self.sources.sizes, node.node_id, self.granted.pop
        if reply.flags.count(STORED) == len(indices) == len(reply.flags) and len(set(map(sizes.__getitem__, indices))) == 1:
            generations = set(map(self.granted.__getitem__, indices))
            if len(generations) == 1:  # as a rule, and much faster
                hint = CachedLocation(node_id, generations.pop(), sizes[indices[0]])
                if len(indices) == len(keys):  # of different keys, or some would be missing
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
