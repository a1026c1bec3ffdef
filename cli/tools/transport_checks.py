"""Checks of `kvstore doctor` on the transports: UCX, NIXL, RDMA devices, huge pages, limits of the operating system.

Each check has a verdict and advice. Checks only read: files below `root`, and the installed libraries.
"""

import importlib.metadata
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line
from kvstore.protocol.settings import format_size
from kvstore.tiers.huge_pages import SHMEM_ENABLED, policy, unavailable_reason
from kvstore.transfer.ucx import library as ucx_library
from kvstore.transfer.ucx.worker import UcxWorker

MIN_SHARED_MEMORY_BYTES: Final = 1 << 30
"""/dev/shm is shared with UCX and inference engines; container runtimes give 64 MiB by default."""
MIN_OPEN_FILES: Final = 8192
"""A connection takes one to three descriptors; the engine may have 1,024 peers, and a process has other files."""
LASTING: Final = (
    f"a file /etc/tmpfiles.d/kvstore.conf with the line `w /{SHMEM_ENABLED} - - - - advise`, or on the kernel's command line "
    "transparent_hugepage_shmem=advise (Linux 6.13)"
)
INSTALL_UCX: Final = install_line("ucx")
INSTALL_NIXL: Final = install_line("nixl")


class CheckVerdict(Enum):
    """Severity of a check's result."""

    OK = "ok"
    WARNING = "warning"
    """Works, but slower or with restrictions."""
    MISSING = "missing"
    """One transport cannot be used; the others can."""
    WRONG = "wrong"
    """The cluster does not work, or soon will not, until this is fixed."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. `advice` is the fix, a command if there is one; "" if nothing needs to be done."""

    name: str
    verdict: CheckVerdict
    found: str
    advice: str = ""


def examine(root: Path = Path("/")) -> list[Check]:
    """Run every check, those of libraries first. `root` is the root of the files."""
    has_rdma = bool(rdma_ports(root))
    return [
        ucxx(),
        libucx(has_rdma=has_rdma),
        ucx_transports(),
        nixl(),
        rdma(root),
        peermem(root, has_rdma=has_rdma),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_rdma=has_rdma),
        hugepages(root),
        transparent_hugepages(root),
        ptrace_scope(root),
        shared_memory(root),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]


def ucxx() -> Check:
    try:
        ucx_library.bindings()
    except ConfigError as error:
        return Check("ucxx", CheckVerdict.MISSING, str(error), INSTALL_UCX)
    return Check("ucxx", CheckVerdict.OK, f"version {_version('ucxx')}")


def libucx(*, has_rdma: bool) -> Check:
    """Version of the loaded UCX, and whether it supports this machine's RDMA devices."""
    try:
        loaded = ucx_library.loaded()
    except ConfigError:
        return Check("libucx", CheckVerdict.MISSING, "not loaded", INSTALL_UCX)
    found = f"version {loaded.version}, {'with' if loaded.has_verbs else 'without'} verbs, {loaded.path}"
    if has_rdma and not loaded.has_verbs:
        advice = f"install a system UCX of version {'.'.join(map(str, ucx_library.MIN_VERSION))} or later with verbs; kvstore prefers it"
        return Check("libucx", CheckVerdict.WARNING, found, advice)
    return Check("libucx", CheckVerdict.OK, found)


def ucx_transports() -> Check:
    """Transports of the loaded UCX as TRANSPORT/DEVICE, under the current UCX_TLS and UCX_NET_DEVICES."""
    name = "UCX transports"
    try:
        worker = UcxWorker.acquire("")
    except ConfigError as error:
        return Check(name, CheckVerdict.MISSING, str(error), INSTALL_UCX)
    try:
        return Check(name, CheckVerdict.OK, ", ".join(worker.resources()))
    finally:
        worker.release()


def nixl() -> Check:
    """Version and plug-ins of NIXL; kvstore uses the plug-in UCX."""
    version = _version("nixl")
    if not version:
        return Check("nixl", CheckVerdict.MISSING, "not installed", INSTALL_NIXL)
    plugins = nixl_plugins()
    found = f"version {version}, plug-ins {', '.join(plugins) or 'none'}"
    if "UCX" in plugins:
        return Check("nixl", CheckVerdict.OK, found)
    return Check("nixl", CheckVerdict.MISSING, found, "the plug-in UCX is missing: reinstall nixl, or set NIXL_PLUGIN_DIR to its folder")


def nixl_plugins() -> list[str]:
    """Names of the plug-ins in NIXL_PLUGIN_DIR, or in the installed package."""
    directory = os.environ.get("NIXL_PLUGIN_DIR")
    names = [path.name for path in Path(directory).glob("libplugin_*.so")] if directory else _files_of("nixl")
    return sorted({name.removeprefix("libplugin_").removesuffix(".so") for name in names if name.startswith("libplugin_")})


def rdma(root: Path) -> Check:
    ports = rdma_ports(root)
    if not ports:
        return Check(
            "RDMA devices", CheckVerdict.MISSING, "none in /sys/class/infiniband", "without them the transports are TCP and shared memory"
        )
    if not any("ACTIVE" in port for port in ports):
        return Check("RDMA devices", CheckVerdict.WARNING, "; ".join(ports), "no port is active: see `ibstat`, `rdma link`")
    return Check("RDMA devices", CheckVerdict.OK, "; ".join(ports))


def rdma_ports(root: Path) -> list[str]:
    """Return a line per port: name, state, rate and link layer."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return [
        " ".join([f"{port.parent.parent.name}:{port.name}", *(_line(port / what) for what in ("state", "rate", "link_layer"))])
        for port in ports
    ]


def peermem(root: Path, *, has_rdma: bool) -> Check:
    """Return whether RDMA devices can access GPU memory."""
    name = "nvidia_peermem"
    modules = [line.split()[0] for line in _text(root / "proc/modules").splitlines()]
    if name in modules:
        return Check(name, CheckVerdict.OK, "loaded")
    if "nvidia" not in modules or not has_rdma:
        return Check(name, CheckVerdict.OK, "not loaded, nor needed: " + ("no RDMA device" if "nvidia" in modules else "no NVIDIA driver"))
    return Check(name, CheckVerdict.MISSING, "not loaded", "modprobe nvidia_peermem; without it GPU memory is copied through host memory")


def locked_memory(limit_bytes: int, *, has_rdma: bool) -> Check:
    """Limit of locked memory, which RDMA registration needs."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Check("locked memory", CheckVerdict.OK, "unlimited")
    found = f"at most {format_size(limit_bytes)}"
    if not has_rdma:
        return Check("locked memory", CheckVerdict.OK, f"{found}; used by RDMA only")
    advice = "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container"
    return Check("locked memory", CheckVerdict.WARNING, found, advice)


def hugepages(root: Path) -> Check:
    """Reserved huge pages. Slabs on them need no first touch, and fewer entries in a NIC's page table."""
    values = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (int(values.get(f"HugePages_{what}", "0")) for what in ("Total", "Free"))
    if not total:
        return Check(
            "reserved huge pages",
            CheckVerdict.WARNING,
            "none",
            "sysctl vm.nr_hugepages=N; without reserved pages large tiers start slower",
        )
    return Check("reserved huge pages", CheckVerdict.OK, f"{free} of {total} free, each {values.get('Hugepagesize', '?').strip()}")


def transparent_hugepages(root: Path) -> Check:
    """Return whether slabs can get transparent huge pages."""
    name, reason = "shared huge pages", unavailable_reason(root)
    if not reason:
        return Check(name, CheckVerdict.OK, f"shmem_enabled is {policy(root)}")
    if not policy(root):
        return Check(name, CheckVerdict.WARNING, reason, "first writes are slower; a kernel with CONFIG_TRANSPARENT_HUGEPAGE has them")
    return Check(
        name, CheckVerdict.WARNING, reason, f"echo advise > /{SHMEM_ENABLED} and restart the node; to last over reboots: {LASTING}"
    )


def ptrace_scope(root: Path) -> Check:
    """Return whether a process may read another's memory (CMA), which UCX uses between processes of one host."""
    scope = _line(root / "proc/sys/kernel/yama/ptrace_scope") or "0"
    if scope == "0":
        return Check("ptrace scope", CheckVerdict.OK, "processes of one user may read one another's memory (CMA)")
    return Check(
        "ptrace scope", CheckVerdict.WARNING, scope, "UCX copies twice within this host; sysctl kernel.yama.ptrace_scope=0 avoids it"
    )


def shared_memory(root: Path) -> Check:
    path = root / "dev/shm"
    if not path.is_dir():
        return Check("/dev/shm", CheckVerdict.MISSING, "not mounted", "mount -t tmpfs tmpfs /dev/shm")
    disk = os.statvfs(path)
    size_bytes, free_bytes = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return judge_shared_memory(size_bytes, free_bytes)


def judge_shared_memory(size_bytes: int, free_bytes: int) -> Check:
    found = f"{format_size(free_bytes)} of {format_size(size_bytes)} free"
    if size_bytes < MIN_SHARED_MEMORY_BYTES:
        return Check("/dev/shm", CheckVerdict.WARNING, found, "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm")
    return Check("/dev/shm", CheckVerdict.OK, found)


def open_files(limit: int) -> Check:
    """Soft limit of open files; each connection takes descriptors."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return Check("open files", CheckVerdict.OK, "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")
    return Check(
        "open files", CheckVerdict.WARNING, f"at most {limit:,}", f"ulimit -n {MIN_OPEN_FILES} or more, LimitNOFILE= in a systemd unit"
    )


def _distributions(package: str) -> Sequence[str]:
    """Installed distributions of the package, including wheels named by their CUDA version."""
    names = [package, *(f"{package}-cu{version}" for version in (12, 13))]
    return [name for name in names if list(importlib.metadata.distributions(name=name))]


def _version(package: str) -> str:
    return next((importlib.metadata.version(name) for name in _distributions(package)), "")


def _files_of(package: str) -> list[str]:
    return [path.name for name in _distributions(package) for path in importlib.metadata.files(name) or []]


def _text(path: Path) -> str:
    """Text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _line(path: Path) -> str:
    return _text(path).strip()
