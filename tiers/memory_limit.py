"""Memory limit of this process by its control groups, version 1 and 2.

The kernel kills a process whose group exceeds its limit. A process is in one group per hierarchy; each ancestor may
have a limit of its own, and the lowest one applies. Source: proc_pid_cgroup(5), cgroups(7), Documentation/admin-guide.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvstore.protocol.settings import format_size

NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 represents "no limit" by the largest multiple of a page that fits 63 bits."""
V1_FILES: Final = ("memory.limit_in_bytes",)
V2_FILES: Final = ("memory.max", "memory.high")
"""Above `memory.high` the kernel throttles the process until memory is freed, which shared memory without swap never
is.
"""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The lowest limit, in bytes, and the file that states it."""

    limit_bytes: int
    file: str

    def __str__(self) -> str:
        return f"{format_size(self.limit_bytes)} ({self.file})"


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted cgroup hierarchy: its root group and its mount point."""

    kind: str
    group: PurePosixPath
    folder: PurePosixPath
    options: tuple[str, ...]


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit of this process, or None if no file states one. `root` is the file system's root."""
    try:
        groups = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return None
    limits = [limit for mount in _mounts(mounts) for limit in _limits_of(root, mount, groups)]
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """Parse mountinfo lines: id, parent, device, root, mount point, options, optional fields, "-", type, source, fs
    options.
    """
    for line in mountinfo.splitlines():
        place, _, filesystem = line.partition(" - ")
        kind, _source, options = (filesystem.split(" ", 2) + ["", ""])[:3]
        if kind in ("cgroup", "cgroup2"):
            fields = place.split(" ")
            yield _Mount(kind, PurePosixPath(_unescaped(fields[3])), PurePosixPath(_unescaped(fields[4])), tuple(options.split(",")))


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\134", "\\")


def _limits_of(root: Path, mount: _Mount, groups: str) -> Iterator[MemoryLimit]:
    """Yield the limits of the process's group and its ancestors, as far as the mount exposes them."""
    if mount.kind == "cgroup" and "memory" not in mount.options:
        return
    own = _group(groups, mount.kind)
    if own is None:
        return
    # Without a cgroup namespace a container's mount may be rooted at a group outside the process's path: the container's own.
    below = own.relative_to(mount.group) if own.is_relative_to(mount.group) else PurePosixPath()
    folders = [mount.folder / part for part in (below, *below.parents)] if ".." not in below.parts else [mount.folder]
    for folder in folders:
        for name in V1_FILES if mount.kind == "cgroup" else V2_FILES:
            limit_bytes = _read(root / str(folder).lstrip("/") / name)
            if limit_bytes is not None and limit_bytes < NO_LIMIT_BYTES:
                yield MemoryLimit(limit_bytes, str(folder / name))


def _group(groups: str, kind: str) -> PurePosixPath | None:
    """Return the process's group in the hierarchy. Lines are number, controllers, path; version 2 has number 0 and no
    controllers.
    """
    for line in groups.splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if (number == "0" and not controllers) if kind == "cgroup2" else "memory" in controllers.split(","):
            return PurePosixPath(path)
    return None


def _read(file: Path) -> int | None:
    """Return the number in the file, or None if the file is missing or contains "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
