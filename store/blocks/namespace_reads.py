"""When blocks of each namespace were last read. Sans-I/O; `now_ns` is passed in.

A read only notes the namespace, in a set; the time is taken when the set is looked at, ten times a second.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.columns import Columns

MAX_TOLD: Final = 256
"""Namespaces that are known and told: those that were read last."""


class NamespaceRead(NamedTuple):
    tenant: str
    namespace: str
    age_s: float


class NamespaceReads:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._noted: set[Columns] = set()
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By tenant and namespace, the one read last behind the others."""

    def note(self, block: Block) -> None:
        """A reader was given the block."""
        self._noted.add(block.columns)

    def stamp(self, now_ns: int) -> None:
        """What was noted was read now."""
        for columns in self._noted:
            self._last_ns[columns.tenant, columns.namespace] = now_ns
            self._last_ns.move_to_end((columns.tenant, columns.namespace))
        self._noted.clear()
        while len(self._last_ns) > MAX_TOLD:
            self._last_ns.popitem(last=False)

    def told(self, now_ns: int) -> Iterator[NamespaceRead]:
        """The namespaces that were read, the last one first."""
        return (NamespaceRead(*name, max(0, now_ns - last_ns) / 1e9) for name, last_ns in reversed(self._last_ns.items()))
