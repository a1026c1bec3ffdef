"""What a node knows of its blocks, in columns: a row a block. Who makes rows is rows.py, and what one means says Block, which is its name.

An object with all of that took 200 bytes a block, its slot in DRAM 110, and numbers too large to be shared 140: here they are 90, the key
beside. What few blocks have is beside the columns. What happens to many blocks at once is an assignment a column, in a C loop.
"""

from array import array
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import Encoding

NOT_SHOWN: Final = -1
GONE: Final = 1
PINNED: Final = 2
MOVING: Final = 4
STAYS_RAW: Final = 8
GUEST: Final = 16
ON_HOLD: Final = (32, 64, 128)
"""Bits of `Columns.states`; the last ones by tier, for the copy that a hold keeps there (holds.py)."""


class Loss(NamedTuple):
    """Why a copy does not give the bytes that were put: it is encoded (`encoding`), or was made from a copy that is or was (None).

    `checksum` is the xxh3_64 of what its readers get.
    """

    checksum: int
    encoding: Encoding | None = None


@dataclass(slots=True, eq=False)
class Others:
    """What few blocks have."""

    hbm: Slot | None = None
    lossy: tuple[Loss | None, ...] = ()
    leaving: int | None = None


class Columns:
    """The columns, and a tenant and namespace whose blocks they are: `named` gives the same columns for others. A number by row each.

    `held` has a bit a tier for the copies that there are. Of that in DRAM `places`, `slot_generations` and `groups` are what its Slot is,
    besides the block's size; `nvme` has that in NVMe, and is no longer than it must be. `policy_states` is what eviction policies know of
    it in DRAM (policy_states.py). `free` are rows that are nobody's.
    """

    __slots__ = (
        "checksums",
        "event_seqs",
        "free",
        "generations",
        "groups",
        "held",
        "hits",
        "keys",
        "last_accesses",
        "namespace",
        "nvme",
        "others",
        "parents",
        "places",
        "policy_states",
        "readers",
        "shown",
        "sizes",
        "slot_generations",
        "states",
        "tenant",
    )

    def __init__(self) -> None:
        self.tenant = self.namespace = ""
        self.sizes, self.generations, self.checksums = array("Q"), array("Q"), array("Q")
        self.last_accesses, self.event_seqs = array("Q"), array("Q")
        self.places, self.slot_generations, self.groups = array("Q"), array("Q"), array("I")
        self.shown, self.readers, self.hits = array("i"), array("I"), array("I")
        self.held, self.states = bytearray(), bytearray()
        self.keys: list[bytes] = []
        self.parents: list[bytes] = []
        self.policy_states: list[Any] = []
        self.nvme: list[Slot | None] = []
        self.others: dict[int, Others] = {}
        self.free: list[int] = []

    def named(self, tenant: str, namespace: str) -> "Columns":
        """The same columns, of blocks of these."""
        found = copy(self)
        found.tenant, found.namespace = tenant, namespace
        return found

    def lengthen(self, count: int) -> None:
        """So many rows more."""
        for wide in (self.sizes, self.generations, self.checksums, self.last_accesses, self.event_seqs, self.places, self.slot_generations):
            wide.frombytes(bytes(8 * count))
        for narrow in (self.groups, self.shown, self.readers, self.hits):
            narrow.frombytes(bytes(4 * count))
        for byte in (self.held, self.states):
            byte.extend(bytes(count))
        for objects in (self.keys, self.parents):
            objects.extend([b""] * count)
        self.policy_states.extend([None] * count)

    def __len__(self) -> int:
        """Rows that there are."""
        return len(self.sizes)
