"""Any daemon, whose constants are settings too: `python -m tests.tuned_daemon kvstore-node --put-ttl-s 1`.

Tests cannot wait as long as operators do. The rest is the real daemon.
"""

import dataclasses
import sys
from importlib import import_module
from typing import Final

from kvstore.master.config import MasterSettings
from kvstore.protocol.settings import is_setting, setting
from kvstore.router.config import RouterSettings
from kvstore.store.config import NodeSettings

DAEMONS: Final = {
    "kvstore-master": "kvstore.master.daemon",
    "kvstore-node": "kvstore.store.daemon",
    "kvstore-router": "kvstore.router.daemon",
}

for _kind in (MasterSettings, NodeSettings, RouterSettings):  # before a daemon makes its options of these fields
    for _field in dataclasses.fields(_kind):
        if not is_setting(_field):
            _field.metadata = setting(_field.default, "A constant.").metadata


def main() -> None:
    """The first argument names the daemon."""
    import_module(DAEMONS[sys.argv.pop(1)]).main()


if __name__ == "__main__":
    main()
