"""Names that programs import from `mooncake.store`."""

from kvstore.engines.mooncake import store
from kvstore.engines.mooncake.store import *  # noqa: F403 all names of `__all__`

__all__ = store.__all__
