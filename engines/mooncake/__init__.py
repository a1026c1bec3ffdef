"""Mooncake's Python API over the store, for programs that were written for Mooncake: `kvstore.engines.mooncake.store` has what they import
from `mooncake.store`. For those whose imports cannot be changed, `distribution/` makes a package of that name, installed by choice."""
