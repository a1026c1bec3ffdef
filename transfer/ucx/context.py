"""Opens a UCX context for one device, with the settings that it needs. Who progresses its worker is worker.py's."""

import os
from pathlib import Path
from typing import Any, Final

from kvstore.protocol.errors import ConfigError

SHARED_MEMORY: Final = frozenset({"posix", "sysv", "xpmem", "cma", "knem", "mm", "sm", "shm", "self", "memory"})
"""Values of UCX_TLS with which no byte leaves the host."""
TCP_SEGMENT: Final = "256k"
"""With error handling UCX sends over TCP in segments, copied at both ends; its own 8 KiB make half of the throughput that these do.
A segment is held for each busy TCP connection of UCX, in either direction."""
INFINIBAND: Final = Path("/sys/class/infiniband")


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
    """A context and its worker. Raises ConfigError."""
    try:
        context = api.UCXContext(options(device), (api.Feature.TAG, api.Feature.WAKEUP))
        worker = api.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except (api.UCXError, RuntimeError, OSError) as error:
        raise ConfigError(f"UCX cannot use {device or 'any device'} here: {error}; see `kvstore doctor`") from None
    found = resources(context.info)
    devices = {name.partition("/")[2].partition(":")[0] for name in found}
    if device and device not in devices and not is_shared_memory(context):
        raise ConfigError(f"UCX has no device {device!r} here, only {', '.join(found)}; see `kvstore doctor`")
    return context, worker


def is_shared_memory(context: Any) -> bool:
    """Whether no byte of it leaves the host."""
    return set(context.config["TLS"].split(",")) <= SHARED_MEMORY
