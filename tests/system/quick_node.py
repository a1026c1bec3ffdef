"""kvstore-node for which a read counts for some seconds and not for a minute, so that what nobody reads any more cools while a test waits.

The rest is the real node.
"""

from kvstore.store.block_table import access_counts as hot
from tests import tuned_daemon

SPAN_S = 2.0

if __name__ == "__main__":
    setattr(hot, "SPAN_S", SPAN_S)  # noqa: B010 - a constant
    tuned_daemon.main()
