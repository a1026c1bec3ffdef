"""Mooncake's Python API over the store, for programs written for Mooncake.

`kvstore.engines.mooncake.store` has the names of `mooncake.store`. For programs whose imports cannot be changed,
`distribution/` builds an optional package named `mooncake`.
"""
