"""kvstore-node whose table may take a quarter of the least that it may otherwise, so that a quarter of the blocks fill it.

The rest is the real node.
"""

from kvstore.store import memory_plan
from tests import tuned_daemon

TABLE_BYTES = memory_plan.MIN_TABLE_BYTES // 4


def main() -> None:
    setattr(memory_plan, "MIN_TABLE_BYTES", TABLE_BYTES)  # noqa: B010 - a constant
    tuned_daemon.main()
