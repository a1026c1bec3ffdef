"""Memory of caches of tensors, which the caller of `TensorCache` gives."""

from dataclasses import dataclass

from kvstore.protocol.settings import Size, constant


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """How much memory lies between an engine's tensors and the store."""

    staging_bytes: Size = constant(Size(64 << 20))
    """Values that one call brings to or from the store at a time, put together in memory of this size: large enough that a round trip
    does not count. A block whose values need more is brought alone."""
    kept_bytes: Size = constant(Size(256 << 20))
    """Of that memory, what is kept between calls, of all threads together: to write memory for the first time takes several times as
    long as the copy."""
