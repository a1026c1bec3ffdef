"""Byte counters of this host's NICs since link-up, as the kernel counts them for all processes.

An interface's bytes come from /proc/net/dev, which always shows this process's network namespace.
RDMA bypasses the interface: its bytes are in the port's counters, in words of four bytes, if the driver has them.
Source: the Linux kernel's Documentation/ABI/stable/sysfs-class-infiniband, port_rcv_data and port_xmit_data;
proc_net_dev(5).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.transfer.topology.model import INFINIBAND, RDMA_KINDS, Nic

WORD_BYTES: Final = 4
"""Unit of InfiniBand's data counters: four octets."""
IN_BYTES_AT, OUT_BYTES_AT = 0, 8
"""Columns of received and sent bytes in /proc/net/dev."""


class Traffic(NamedTuple):
    """Bytes since link-up."""

    in_bytes: int
    out_bytes: int


def traffic(nics: Iterable[Nic], root: Path = Path("/")) -> dict[str, Traffic]:
    """Return the counters by NIC name, without those that cannot be read. Reads a few small files: some 20 us per NIC.
    Reads none for no NIC, as a node calls it with each heartbeat.
    """
    nics = list(nics)
    interfaces = _interfaces(root) if nics else {}
    found: dict[str, Traffic] = {}
    for nic in nics:
        counted = [_of_port(nic.name, root)] if nic.kind in RDMA_KINDS else []
        if nic.kind != INFINIBAND:  # IP over InfiniBand is counted by the port
            counted.append(interfaces.get(nic.interface))
        known = [one for one in counted if one is not None]
        if known:
            found[nic.name] = Traffic(sum(one.in_bytes for one in known), sum(one.out_bytes for one in known))
    return found


def _interfaces(root: Path) -> dict[str, Traffic]:
    found = {}
    for line in _read(root / "proc/net/dev").splitlines()[2:]:
        name, _colon, columns = line.partition(":")
        counts = columns.split()
        if len(counts) > OUT_BYTES_AT:
            found[name.strip()] = Traffic(int(counts[IN_BYTES_AT]), int(counts[OUT_BYTES_AT]))
    return found


def _of_port(name: str, root: Path) -> Traffic | None:
    device, _colon, port = name.partition(":")
    folder = root / "sys/class/infiniband" / device / "ports" / (port or "1") / "counters"
    words = [_read(folder / file) for file in ("port_rcv_data", "port_xmit_data")]
    return Traffic(*(int(text) * WORD_BYTES for text in words)) if all(text.isdecimal() for text in words) else None


def _read(path: Path) -> str:
    """Return the stripped text; "" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
