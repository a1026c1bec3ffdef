"""Names that programs import from `mooncake.engine`."""

from kvstore.engines.mooncake import engine
from kvstore.engines.mooncake.engine import *  # noqa: F403 all names of `__all__`

__all__ = engine.__all__
