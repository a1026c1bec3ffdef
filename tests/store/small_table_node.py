"""kvstore-node with a quarter of the minimum table size, so that fewer blocks fill it. Otherwise the real node."""

from kvstore.store import memory_plan
from tests import tuned_daemon

TABLE_BYTES = memory_plan.MIN_TABLE_BYTES // 4


def main() -> None:
    setattr(memory_plan, "MIN_TABLE_BYTES", TABLE_BYTES)  # noqa: B010 - a constant
    tuned_daemon.main()
