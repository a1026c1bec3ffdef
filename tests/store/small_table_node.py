"""kvstore-node whose table may take a quarter of the least that it may otherwise, so that a quarter of the blocks fill it.

The rest is the real node.
"""

from kvstore.store import config, daemon

TABLE_BYTES = config.MIN_TABLE_BYTES // 4


def main() -> None:
    setattr(config, "MIN_TABLE_BYTES", TABLE_BYTES)  # noqa: B010 - a constant
    daemon.main()
