"""How large a slot a value gets. It knows sizes and tenants, no slots.

The first sizes of a tenant are taken as they are, not rounded to any alignment: block sizes of real models are multiples of 64 on
their own, a store sees few of them, and so N x B bytes hold N blocks of B bytes for every B. Later sizes round up to eight steps a
doubling, which wastes at most 12.5 % and bounds the number of classes. Source: the size classes of jemalloc, jemalloc(3).
"""

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.settings import format_size

STEPS_BITS = 3
"""Rounded sizes have 2**3 = 8 steps a doubling."""


class SizeClasses:
    """Assigns slot sizes in a tier of `capacity_bytes`; the first `exact_classes` sizes of each tenant are exact."""

    def __init__(self, capacity_bytes: int, exact_classes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._exact_classes = exact_classes
        self._exact_sizes: dict[str, set[int]] = {}

    def slot_bytes(self, size_bytes: int, tenant: str) -> int:
        """The slot size for a value; once given, always the same. Raises InvalidArgument when no such value can ever be held."""
        if not 1 <= size_bytes <= MAX_VALUE_BYTES:
            raise InvalidArgument(f"a value has 1 byte to {format_size(MAX_VALUE_BYTES)}, not {size_bytes:,} bytes")
        if size_bytes > self._capacity_bytes:
            raise InvalidArgument(f"{format_size(size_bytes)} never fit into a tier of {format_size(self._capacity_bytes)}")
        exact_sizes = self._exact_sizes.setdefault(tenant, set())
        if size_bytes not in exact_sizes and len(exact_sizes) >= self._exact_classes:
            return min(rounded_size(size_bytes), self._capacity_bytes)
        exact_sizes.add(size_bytes)
        return size_bytes


def rounded_size(size_bytes: int) -> int:
    """The smallest of the rounded sizes (eight a doubling) that is at least `size_bytes`."""
    step = 1 << max(0, (size_bytes - 1).bit_length() - 1 - STEPS_BITS)
    return -(-size_bytes // step) * step
