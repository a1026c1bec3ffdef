"""kvstore-node that counts a read for some seconds instead of a minute, so that unread blocks become cold while a test waits.

Otherwise it is the real node.
"""

from kvstore.store.block_table import access_counts as hot
from tests import tuned_daemon

SPAN_S = 2.0

if __name__ == "__main__":
    setattr(hot, "SPAN_S", SPAN_S)  # noqa: B010 - a constant
    tuned_daemon.main()
