"""Names that programs import from `mooncake.store`."""

from kvstore.engines.mooncake import store
from kvstore.engines.mooncake.store import *  # noqa: F403 as many as Mooncake's module has

__all__ = store.__all__
