"""What went over each rail of this host since the engine began, whoever the peer was and whether it is still there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvstore.transfer.paths.choice import Path


@dataclass(slots=True)
class RailCount:
    """`failed` slices were begun here and went elsewhere, or nowhere; `rests` is how often a path of the rail was let rest for that."""

    delivered_bytes: int = 0
    delivered_slices: int = 0
    failed_slices: int = 0
    rests: int = 0


class RailCounts:
    """By transport and rail of this side. The carrier's lock guards it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], RailCount] = {}

    def of(self, path: Path) -> RailCount:
        """The live one."""
        name = path.transport, path.local_rail
        count = self._counts.get(name)
        if count is None:
            count = self._counts[name] = RailCount()
        return count

    def delivered(self, path: Path, size_bytes: int) -> None:
        count = self.of(path)
        count.delivered_bytes += size_bytes
        count.delivered_slices += 1

    def failed(self, path: Path, *, rests: bool) -> None:
        count = self.of(path)
        count.failed_slices += 1
        count.rests += rests

    def read(self) -> Mapping[tuple[str, str], RailCount]:
        """As they are now."""
        return {name: replace(count) for name, count in self._counts.items()}
