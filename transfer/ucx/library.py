"""Loads the UCX library through ucxx on first use, and opens its context for one device.

The wheel `libucx-cu12` is built without verbs: it reaches RDMA devices only as Ethernet. A system UCX with verbs is
therefore preferred if ucxx supports it.
"""

import ctypes
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line

LIBRARY_DIRECTORIES: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/ucx/lib",
)
"""Searched for a system UCX, after LD_LIBRARY_PATH."""
PREFER_SYSTEM: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""Variable that makes the wheel use the system's library. An operator's setting takes precedence. Source:
libucx/load.py.
"""
MIN_VERSION: Final = (1, 19)
"""ucxx 0.52 refuses an older UCX."""
LIBRARIES: Final = ("libucs.so.0", "libucs_signal.so.0", "libuct.so.0", "libucp.so.0")
"""In order of dependency. The unversioned names belong to the `-dev` package and are often missing."""
PROBE_TIMEOUT_S: Final = 10.0
_PROBE: Final = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
numbers = [ctypes.c_uint() for _ in range(3)]
library.ucp_get_version(*map(ctypes.byref, numbers))
print(*[number.value for number in numbers])
"""
SHARED_MEMORY: Final = frozenset({"posix", "sysv", "xpmem", "cma", "knem", "mm", "sm", "shm", "self", "memory"})
"""Values of UCX_TLS with which no byte leaves the host."""
TCP_SEGMENT: Final = "256k"
"""With error handling UCX sends over TCP in segments that are copied at both ends; its default of 8 KiB halves the
throughput. A segment is allocated per busy TCP connection of UCX and direction.
"""
INFINIBAND: Final = Path("/sys/class/infiniband")


class LoadedUcx(NamedTuple):
    """The UCX of this process."""

    version: str
    path: str
    """Path of libucp."""
    has_verbs: bool
    """True if its module for InfiniBand and RoCE is installed."""


@functools.cache
def bindings() -> Any:
    """Return ucxx's native module. Raises ConfigError if ucxx is missing or does not load; a failure is not cached."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx sets a variable of which UCX would warn at every start
    _prefer_system_library()
    try:
        importlib.import_module("ucxx")
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise ConfigError(f"the transport ucx needs ucxx: {install_line('ucx')} ({error})") from None


def array_class() -> Any:
    """Return ucxx's wrapper of memory to send or fill. Raises ConfigError as `bindings`."""
    bindings()
    return importlib.import_module("ucxx._lib.arr").Array


def loaded() -> LoadedUcx:
    """Return which UCX ucxx has loaded. Raises ConfigError as `bindings`."""
    version = ".".join(map(str, bindings().get_ucx_version()))
    path = next((line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp.so" in line), "")
    return LoadedUcx(version, path, has_verbs(Path(path).parent))


def has_verbs(directory: Path) -> bool:
    """Return True if the UCX in this directory supports RDMA devices."""
    return bool(list((directory / "ucx").glob("libuct_ib*.so*")))  # a list: an abandoned iterator would keep the folder open


def system_library(directories: Sequence[str] | None = None) -> Path | None:
    """Return the directory of the first system UCX with verbs that ucxx supports, or None."""
    if directories is None:
        directories = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *LIBRARY_DIRECTORIES]
    for directory in map(Path, directories):
        if (directory / "libucp.so.0").exists() and has_verbs(directory) and version_of(directory) >= MIN_VERSION:
            return directory
    return None


def version_of(directory: Path) -> tuple[int, ...]:
    """Return the version of the UCX in this directory; () if it does not load. Uses a subprocess, as a library cannot
    be unloaded.
    """
    command = [sys.executable, "-c", _PROBE, str(directory / "libucp.so.0")]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
        return tuple(map(int, answer.stdout.split()))
    except (subprocess.SubprocessError, ValueError):
        return ()


def _prefer_system_library() -> None:
    if PREFER_SYSTEM in os.environ:
        return
    directory = system_library()
    if directory is None:
        return
    # ucxx then finds libraries of these sonames loaded, and PREFER_SYSTEM keeps the wheel from loading its own.
    for name in LIBRARIES:
        if (directory / name).exists():
            ctypes.CDLL(str(directory / name))
    try:
        loader = importlib.import_module("libucx.load")
    except ImportError:
        return
    loader.UCX_LIBRARIES = list(LIBRARIES)  # type: ignore[attr-defined]
    os.environ[PREFER_SYSTEM] = "true"


def resources(info: str) -> list[str]:
    """Parse a context's transports and devices, TRANSPORT/DEVICE, from UCX's output."""
    return [line.split()[-1] for line in info.splitlines() if line.startswith("#") and " resource " in line]


def net_devices(device: str) -> str:
    """Return UCX_NET_DEVICES for a device: UCX requires the port of an InfiniBand device."""
    ports = INFINIBAND / device / "ports"
    if not ports.is_dir():
        return device
    return ",".join(f"{device}:{port.name}" for port in sorted(ports.iterdir()))


def options(device: str) -> dict[str, str]:
    """Return UCX's settings for a device, without the prefix UCX_. Environment variables take precedence."""
    chosen = {"TCP_TX_SEG_SIZE": TCP_SEGMENT, "TCP_RX_SEG_SIZE": TCP_SEGMENT}
    chosen = {name: value for name, value in chosen.items() if f"UCX_{name}" not in os.environ}
    return chosen | ({"NET_DEVICES": net_devices(device)} if device else {})


def open_context(api: Any, device: str) -> tuple[Any, Any]:
    """Return a context and its worker. Raises ConfigError, also if UCX_TLS allows only shared memory: UCX then neither
    detects a peer's death nor cancels messages.
    """
    try:
        context = api.UCXContext(options(device), (api.Feature.TAG, api.Feature.WAKEUP))
        worker = api.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except (api.UCXError, RuntimeError, OSError) as error:
        raise ConfigError(f"UCX cannot use {device or 'any device'} here: {error}; see `kvstore doctor`") from None
    if set(context.config["TLS"].split(",")) <= SHARED_MEMORY:
        raise ConfigError(f"UCX_TLS is {context.config['TLS']}, which allows only shared memory: unset it, or use the transport shm")
    found = resources(context.info)
    devices = {name.partition("/")[2].partition(":")[0] for name in found}
    if device and device not in devices:
        raise ConfigError(f"UCX has no device {device!r} here, only {', '.join(found)}; see `kvstore doctor`")
    return context, worker
