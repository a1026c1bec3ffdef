"""kvstore-node whose NVMe deletes nothing while the file `disk-is-full` lies in its folder: LMDB answers as it does then.

Only transactions that delete are refused, so that blocks still get there; the rest is the real node on the real LMDB.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstore.store import storage
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_env import begin_transaction
from tests import tuned_daemon

MARK: Final = "disk-is-full"


class _Refusing:
    """A transaction that has no room for a deletion."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def delete(self, key: bytes, *, db: Any) -> bool:
        raise lmdb.MapFullError("delete")


@contextmanager
def begin(environment: lmdb.Environment, write: bool) -> Iterator[Any]:
    with begin_transaction(environment, write) as transaction:
        is_full = write and (Path(environment.path()) / MARK).exists()
        yield _Refusing(transaction) if is_full else transaction


if __name__ == "__main__":
    setattr(storage, "NvmeTier", functools.partial(NvmeTier, begin=begin))  # noqa: B010 - what the node opens
    tuned_daemon.main()
