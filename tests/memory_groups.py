"""Control groups with a memory limit, for tests with real processes: of version 1 or 2, as this machine permits."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvstore.testing.transfer.awaited import eventually

V1: Final = Path("/sys/fs/cgroup/memory")
V2: Final = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A group without processes. `prefix` goes before the command line of what is to run in it."""

    def __init__(self, folder: Path, limit_file: str, kills_file: str) -> None:
        self.folder = folder
        self.limit_file = folder / limit_file
        self._kills_file = folder / kills_file
        self.prefix = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def kills(self) -> int:
        """Processes of the group that the kernel has killed for want of memory."""
        found = re.search(r"^oom_kill (\d+)$", self._kills_file.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])

    def _is_removed(self) -> bool:
        """A group goes once its last process has been waited for."""
        try:
            self.folder.rmdir()
        except OSError:
            return False
        return True


@contextmanager
def memory_group(limit_bytes: int, *, nested: bool = False) -> Iterator[MemoryGroup]:
    """Skips the test where no group can be made. `nested`: the group is inside the one that has the limit."""
    name = f"kvstore-test-{os.getpid()}"
    group = _made(V1 / name, "memory.limit_in_bytes", "memory.oom_control") or _made(V2 / name, "memory.max", "memory.events")
    if group is None:
        pytest.skip("this machine lets the tests make no control group with a memory limit")
    group.limit_file.write_text(f"{limit_bytes}\n")
    inner = MemoryGroup(group.folder / "inner", group.limit_file.name, "memory.oom_control") if nested else None
    if inner is not None:
        inner.folder.mkdir()
    try:
        yield inner or group
    finally:
        for made in (inner, group):
            if made is not None:
                eventually(made._is_removed, f"{made.folder} has no process any more")


def _made(folder: Path, limit_file: str, kills_file: str) -> MemoryGroup | None:
    try:
        folder.mkdir()
    except OSError:
        return None
    if not (folder / limit_file).exists():
        folder.rmdir()
        return None
    return MemoryGroup(folder, limit_file, kills_file)
