"""A catalog for tests: nothing is durable before the test says so."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.master.catalogs.interface import Change, Done
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.master.directory.index.queries import PrefixMatches


class Held(MemoryCatalog):
    """A catalog whose commits wait until the test says that they are durable."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[tuple[Sequence[Change], Done]] = []

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self.commits.append((changes, done))


@dataclass
class Place:
    """A ClusterPosition that only names its partition."""

    partition: int

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        raise AssertionError("no test schedules")

    def blocks_elsewhere(self, node_id: int) -> int:
        return 0
