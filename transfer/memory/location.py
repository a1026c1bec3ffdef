"""Where memory lies: the NUMA node of an address, as the kernel says. It chooses nothing: rails near a location are the topology's."""

import ctypes
import platform
from functools import lru_cache
from pathlib import Path
from typing import Final

ANYWHERE: Final = "cpu:0"
"""Said of memory of hosts with one NUMA node, and where the kernel does not tell."""
_NODES: Final = Path("/sys/devices/system/node")
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
"""Its number; the C library has no function for it, and libnuma, which has one, is seldom installed."""
_NODE_OF_ADDRESS: Final = 3
"""MPOL_F_NODE | MPOL_F_ADDR."""
_libc = ctypes.CDLL(None)


def location_of(address: int) -> str:
    """ "cpu:N" of the page at `address`; a page that does not exist yet is made, as by reading it."""
    node = node_of(address) if _count_nodes() > 1 else None
    return ANYWHERE if node is None else f"cpu:{node}"


def node_of(address: int) -> int | None:
    """The NUMA node of the page at `address`. None: the kernel does not tell: a container may not ask, or nothing is mapped there."""
    number, node = _GET_MEMPOLICY.get(platform.machine()), ctypes.c_int(-1)
    if number is None:
        return None
    failed = _libc.syscall(
        ctypes.c_long(number), ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address), ctypes.c_ulong(_NODE_OF_ADDRESS)
    )
    return None if failed else node.value


@lru_cache(maxsize=1)
def _count_nodes() -> int:
    return sum(1 for _ in _NODES.glob("node[0-9]*"))
