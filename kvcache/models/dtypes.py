"""Element types of caches and weights by name, and their sizes. Names only: torch and numpy have their own of the same name."""

from typing import Final

from kvstore.protocol.errors import InvalidArgument

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by the name that torch has for its type."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        InvalidArgument: it is none of DTYPE_BYTES (the message lists them).
    """
    try:
        return DTYPE_BYTES[dtype]
    except (KeyError, TypeError):
        raise InvalidArgument(f"dtype is {dtype!r}: take one of {', '.join(DTYPE_BYTES)}") from None
