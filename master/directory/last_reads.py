"""When clients last read blocks of each namespace, as nodes tell it. In memory only. Sans-I/O; `now_ns` is passed in."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

MAX_NAMESPACES: Final = 4096
"""Those that were read last."""
MAX_TOLD: Final = 256
"""Taken of one heartbeat."""


class NamespaceRead(NamedTuple):
    tenant: str
    namespace: str
    age_s: float


class LastReads:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()

    def take(self, reads: Iterable[NamespaceRead], now_ns: int) -> None:
        """What a node tells. Raises InvalidArgument for an age that is none; what came before it is taken."""
        for _number, read in zip(range(MAX_TOLD), reads, strict=False):
            if not 0 <= read.age_s < math.inf:
                raise InvalidArgument(f"a namespace was read {read.age_s} s ago, says a node: an age is a finite number above 0")
            name, last_ns = (read.tenant, read.namespace), now_ns - int(read.age_s * 1e9)
            if last_ns > self._last_ns.get(name, -(1 << 63)):
                self._last_ns[name] = last_ns
                self._last_ns.move_to_end(name)
        while len(self._last_ns) > MAX_NAMESPACES:
            self._last_ns.popitem(last=False)

    def age_s(self, tenant: str, namespace: str, now_ns: int) -> float | None:
        """Seconds since the last read; None: no node told of one."""
        last_ns = self._last_ns.get((tenant, namespace))
        return None if last_ns is None else max(0, now_ns - last_ns) / 1e9
