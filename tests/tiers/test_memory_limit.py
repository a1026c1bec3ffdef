"""The memory limit of control groups, read from files as kernels and container runtimes write them."""

from pathlib import Path

import pytest

from kvstore.tiers.memory_limit import memory_limit

V1_NONE = "9223372036854771712\n"
V1_MOUNTS = """23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime master:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = """23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:26 {root} /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
"""


class Host:
    """The files of a host, or of a container on it."""

    def __init__(self, root: Path, mounts: str, groups: str) -> None:
        self.root = root
        self.write("proc/self/mountinfo", mounts)
        self.write("proc/self/cgroup", groups)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def found(self) -> tuple[int, str] | None:
        limit = memory_limit(self.root)
        return None if limit is None else (limit.limit_bytes, limit.file)


@pytest.mark.promise("memory-bounded")
def test_v2_lowest_limit_on_the_path_holds(tmp_path: Path) -> None:
    host = Host(tmp_path, V2_MOUNTS.format(root="/"), "0::/kubepods.slice/pod7.slice/node.scope\n")
    assert host.found() is None
    host.write("sys/fs/cgroup/kubepods.slice/memory.max", f"{8 << 30}\n")
    host.write("sys/fs/cgroup/kubepods.slice/pod7.slice/memory.max", f"{4 << 30}\n")
    host.write("sys/fs/cgroup/kubepods.slice/pod7.slice/node.scope/memory.max", "max\n")
    host.write("sys/fs/cgroup/kubepods.slice/pod7.slice/node.scope/memory.high", "max\n")
    assert host.found() == (4 << 30, "/sys/fs/cgroup/kubepods.slice/pod7.slice/memory.max")
    host.write("sys/fs/cgroup/kubepods.slice/pod7.slice/node.scope/memory.high", f"{3 << 30}\n")
    assert host.found() == (3 << 30, "/sys/fs/cgroup/kubepods.slice/pod7.slice/node.scope/memory.high")
    assert str(memory_limit(tmp_path)) == "3 GiB (/sys/fs/cgroup/kubepods.slice/pod7.slice/node.scope/memory.high)"


def test_v2_in_a_container_with_groups_of_its_own(tmp_path: Path) -> None:
    host = Host(tmp_path, V2_MOUNTS.format(root="/"), "0::/\n")
    host.write("sys/fs/cgroup/memory.max", f"{576 << 20}\n")
    assert host.found() == (576 << 20, "/sys/fs/cgroup/memory.max")


def test_v1_lowest_limit_on_the_path_holds(tmp_path: Path) -> None:
    groups = "9:name=systemd:/\n5:devices:/a/b\n4:memory:/a/b\n2:cpu,cpuacct:/\n0::/\n"
    host = Host(tmp_path, V1_MOUNTS.format(root="/"), groups)
    host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", V1_NONE)
    host.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{576 << 20}\n")
    host.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", V1_NONE)
    host.write("sys/fs/cgroup/cpu,cpuacct/memory.limit_in_bytes", "1\n")
    assert host.found() == (576 << 20, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes")


@pytest.mark.parametrize("group", ["/docker/4f2a/below", "/elsewhere", "/docker/../../x"])
def test_v1_container_sees_its_own_group_mounted(tmp_path: Path, group: str) -> None:
    """The path of the group is the host's; the mounted folder is the container's group, regardless of the path."""
    host = Host(tmp_path, V1_MOUNTS.format(root="/docker/4f2a"), f"4:memory:{group}\n0::/\n")
    host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{1 << 30}\n")
    assert host.found() == (1 << 30, "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_group_whose_path_leads_out_of_the_name_space(tmp_path: Path) -> None:
    host = Host(tmp_path, V2_MOUNTS.format(root="/"), "0::/../outside\n")
    host.write("sys/fs/cgroup/memory.max", f"{1 << 30}\n")
    host.write("sys/fs/outside/memory.max", "1\n")
    assert host.found() == (1 << 30, "/sys/fs/cgroup/memory.max")
