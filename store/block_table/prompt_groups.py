"""Groups of blocks that are to have one home node, in a key space with several partitions.

A master knows only its own blocks of a prompt. So the node, which knows the parents of its blocks, names with each
commit the group of the block, and every master chooses the same home for a group (home_copies.py).

A group begins with the first block of a prompt, and behind a shared prefix: from the SHARED_CHILDREN-th child on,
each child begins one. A block whose parent is unknown belongs to the group named after the parent.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.protocol.partitions import SHARED_CHILDREN
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap

MAX_KNOWN: Final = 1 << 16
"""Remembered blocks, those used last: a shared prefix stays as long as prompts begin behind it. About 20 MB."""
MAX_WALK: Final = 1 << 14
"""Ancestors examined for a block, in about 20 ms. One is usual, because those of earlier commits are remembered. A prompt
of 128k tokens that continues after MAX_KNOWN others has 8,192 blocks of 16 tokens."""


@dataclass(slots=True)
class _Known:
    group: bytes
    children: int = 0


class PromptGroups:
    """Groups of a node's blocks. Not thread-safe: called from the node's loop."""

    def __init__(self, find: Callable[[str, bytes], Block | None], partition_map: PartitionMap) -> None:
        """`find` returns a tenant's visible block."""
        self._find = find
        self._partition_map = partition_map
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()

    def of(self, blocks: Iterable[Block]) -> bytes:
        """Return the groups of blocks, 8 bytes each; with one partition nothing, since its master knows all parents."""
        if self._partition_map.count == 1:
            return b""
        groups = b"".join([self._of(block.tenant, block.key, block.parent) for block in blocks])
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return groups

    def _of(self, tenant: str, key: bytes, parent: bytes) -> bytes:
        path: list[tuple[bytes, bytes]] = []
        while (known := self._known.get((tenant, key))) is None and len(path) < MAX_WALK:
            path.append((key, parent))
            if (tenant, parent) in self._known:
                key = parent
            elif parent and (above := self._find(tenant, parent)) is not None:
                key, parent = parent, above.parent
            else:
                break
        if known is not None:
            self._known.move_to_end((tenant, key))
        for key, parent in reversed(path):
            if known is None:
                known = _Known(_named(parent or key))
            else:
                known.children += 1
                known = _Known(known.group if known.children < SHARED_CHILDREN else _named(key))
            self._known[tenant, key] = known
        assert known is not None
        return known.group


def _named(key: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key)
