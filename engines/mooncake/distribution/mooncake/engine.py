"""Names that programs import from `mooncake.engine`."""

from kvstore.engines.mooncake import engine
from kvstore.engines.mooncake.engine import *  # noqa: F403 as many as are offered

__all__ = engine.__all__
