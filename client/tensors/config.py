"""Memory limits of `TensorCache`, set by its caller."""

from dataclasses import dataclass

from kvstore.protocol.settings import Size, constant


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """Memory between an engine's tensors and the store."""

    staging_bytes: Size = constant(Size(64 << 20))
    """Staging memory of one call: values moved at a time. Large enough to hide a round trip; a block that needs more is
    moved alone."""
    kept_bytes: Size = constant(Size(256 << 20))
    """Staging memory kept between calls, over all threads: first writes to fresh memory take several times as long as
    the copy."""
