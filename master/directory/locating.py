"""The answer to a Lookup: columns of the rows found, gathered in C loops, of replicas that can be read now. Pure."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.rows import Rows
from kvstore.protocol.frames import MAX_COUNT
from kvstore.protocol.master_messages import Locations

Indexes = NDArray[np.intp]


def locate(rows: Rows, found: Indexes, *, avoid: int = 0) -> Locations:
    """Where the blocks of the rows `found` (NO_ROW: a miss) are, at nodes that live and are not `avoid` (0: none). Where these are more
    than a message takes, as many are told of each block."""
    sets = rows.sets
    found = found.copy()
    held = np.frombuffer(rows.holders, np.uint32)[found]
    replicas = np.frombuffer(sets.replicas, np.uint8)[held]
    found[replicas == 0] = NO_ROW
    if int(replicas.sum(dtype=np.int64)) > MAX_COUNT:
        most = MAX_COUNT // len(held)
        nodes, tiers = _some_of(rows, held, found, most)
        replicas = np.minimum(replicas, most)
    elif len(held) and (held == held[0]).all():  # as a rule: a chain's blocks are together
        nodes, tiers = sets.nodes[held[0]] * len(held), sets.tiers[held[0]] * len(held)
    else:
        held_list = held.tolist()
        nodes, tiers = b"".join(map(sets.nodes.__getitem__, held_list)), b"".join(map(sets.tiers.__getitem__, held_list))
    answer = Locations(
        replicas.tobytes(),
        _picked(rows.sizes, found),
        _picked(rows.checksums, found),
        _picked(rows.generations, found),
        array("I", nodes),
        tiers,
    )
    return _without(answer, avoid) if avoid and avoid in answer.nodes else answer


def _some_of(rows: Rows, held: NDArray[np.uint32], found: Indexes, most: int) -> tuple[bytes, bytes]:
    """Nodes and tiers of so many replicas a block at most: those from one on that its generation says, so that reads are spread."""
    nodes, tiers = bytearray(), bytearray()
    for index, generation in zip(held.tolist(), _picked(rows.generations, found), strict=True):
        its_nodes, its_tiers = rows.sets.nodes[index], rows.sets.tiers[index]
        if len(its_tiers) > most:
            first = generation % len(its_tiers)
            its_nodes = (2 * its_nodes)[4 * first : 4 * (first + most)]
            its_tiers = (2 * its_tiers)[first : first + most]
        nodes += its_nodes
        tiers += its_tiers
    return bytes(nodes), bytes(tiers)


def _picked(column: "array[int]", rows: Indexes) -> "array[int]":
    return array("Q", np.frombuffer(column, np.uint64)[rows].tobytes())


def _without(answer: Locations, avoid: int) -> Locations:
    """`answer` without the replicas at node `avoid`; a block that is only there is a miss."""
    replicas, at, kept = bytearray(answer.replicas), 0, array("I")
    tiers = bytearray()
    for index, count in enumerate(answer.replicas):
        for node_id, mask in zip(answer.nodes[at : at + count], answer.tiers[at : at + count], strict=True):
            if node_id == avoid:
                replicas[index] -= 1
            else:
                kept.append(node_id)
                tiers.append(mask)
        at += count

    def present(column: Sequence[int]) -> "array[int]":
        return array("Q", [value if count else 0 for value, count in zip(column, replicas, strict=True)])

    return Locations(bytes(replicas), present(answer.sizes), present(answer.checksums), present(answer.generations), kept, bytes(tiers))
