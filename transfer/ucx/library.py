"""Loads the UCX library through ucxx, when it is first needed, and opens its context for one device.

The wheel `libucx-cu12` is built without verbs: it reaches RDMA devices only as Ethernet. A system UCX that has verbs is therefore
preferred when ucxx can work with it.
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
"""Where a system UCX is looked for, after LD_LIBRARY_PATH."""
PREFER_SYSTEM: Final = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
"""The variable by which the wheel is told to leave the choice to the system. Set by the operator, it decides. Source: libucx/load.py."""
MIN_VERSION: Final = (1, 19)
"""ucxx 0.52 refuses an older UCX."""
LIBRARIES: Final = ("libucs.so.0", "libucs_signal.so.0", "libuct.so.0", "libucp.so.0")
"""In the order in which they need one another; those of the package `-dev` have no number and are often missing."""
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
"""With error handling UCX sends over TCP in segments, copied at both ends; its own 8 KiB make half of the throughput that these do.
A segment is held for each busy TCP connection of UCX, in either direction."""
INFINIBAND: Final = Path("/sys/class/infiniband")


class LoadedUcx(NamedTuple):
    """The UCX of this process."""

    version: str
    path: str
    """Of libucp."""
    has_verbs: bool
    """Whether its module for InfiniBand and RoCE is installed."""


@functools.cache
def bindings() -> Any:
    """The module with ucxx's classes. Raises ConfigError: ucxx is missing or does not load. A missing one is looked for again."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx sets one that UCX then complains of, on every start
    _prefer_system_library()
    try:
        importlib.import_module("ucxx")
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise ConfigError(f"the transport ucx needs ucxx: {install_line('ucx')} ({error})") from None


def array_class() -> Any:
    """ucxx's wrapper of memory to be sent or filled. Raises ConfigError as `bindings`."""
    bindings()
    return importlib.import_module("ucxx._lib.arr").Array


def loaded() -> LoadedUcx:
    """Which UCX ucxx has loaded. Raises ConfigError as `bindings`."""
    version = ".".join(map(str, bindings().get_ucx_version()))
    path = next((line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp.so" in line), "")
    return LoadedUcx(version, path, has_verbs(Path(path).parent))


def has_verbs(directory: Path) -> bool:
    """Whether the UCX in this directory can use RDMA devices."""
    return bool(list((directory / "ucx").glob("libuct_ib*.so*")))  # all: one left half way leaves its folder open


def system_library(directories: Sequence[str] | None = None) -> Path | None:
    """The directory of the first system UCX that has verbs and that ucxx can work with; None if there is none."""
    if directories is None:
        directories = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *LIBRARY_DIRECTORIES]
    for directory in map(Path, directories):
        if (directory / "libucp.so.0").exists() and has_verbs(directory) and version_of(directory) >= MIN_VERSION:
            return directory
    return None


def version_of(directory: Path) -> tuple[int, ...]:
    """Of the UCX in this directory; () if it does not load. Asks another process, for a loaded library cannot be taken back."""
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
    # Libraries of these sonames are then there already when ucxx asks for them, and the wheel is told not to load its own.
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
    """The transports of a context and their devices, TRANSPORT/DEVICE, from what UCX prints of it."""
    return [line.split()[-1] for line in info.splitlines() if line.startswith("#") and " resource " in line]


def net_devices(device: str) -> str:
    """UCX_NET_DEVICES for a device as the system names it: UCX wants the port of an InfiniBand device said."""
    ports = INFINIBAND / device / "ports"
    if not ports.is_dir():
        return device
    return ",".join(f"{device}:{port.name}" for port in sorted(ports.iterdir()))


def options(device: str) -> dict[str, str]:
    """UCX's settings for a device, without UCX_. What the operator set in the environment stays."""
    chosen = {"TCP_TX_SEG_SIZE": TCP_SEGMENT, "TCP_RX_SEG_SIZE": TCP_SEGMENT}
    chosen = {name: value for name, value in chosen.items() if f"UCX_{name}" not in os.environ}
    return chosen | ({"NET_DEVICES": net_devices(device)} if device else {})


def open_context(api: Any, device: str) -> tuple[Any, Any]:
    """A context and its worker. Raises ConfigError, also where UCX_TLS leaves shared memory alone: UCX then neither notices a peer's death
    nor takes a message back."""
    try:
        context = api.UCXContext(options(device), (api.Feature.TAG, api.Feature.WAKEUP))
        worker = api.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except (api.UCXError, RuntimeError, OSError) as error:
        raise ConfigError(f"UCX cannot use {device or 'any device'} here: {error}; see `kvstore doctor`") from None
    if set(context.config["TLS"].split(",")) <= SHARED_MEMORY:
        raise ConfigError(f"UCX_TLS is {context.config['TLS']}, which is shared memory alone: unset it, or use the transport shm")
    found = resources(context.info)
    devices = {name.partition("/")[2].partition(":")[0] for name in found}
    if device and device not in devices:
        raise ConfigError(f"UCX has no device {device!r} here, only {', '.join(found)}; see `kvstore doctor`")
    return context, worker
