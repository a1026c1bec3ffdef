"""What the NICs of this host have carried since they came up, whoever sent it, as the kernel counts it.

An interface's bytes are those of /proc/net/dev, which is of this process's own network namespace whichever /sys is mounted. What RDMA
moves goes past the interface: it is in the port's counters, in words of four bytes, where the driver has them. Other counters than these
are no bytes.
Source: the Linux kernel's Documentation/ABI/stable/sysfs-class-infiniband, port_rcv_data and port_xmit_data; proc_net_dev(5).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.transfer.topology.model import INFINIBAND, RDMA_KINDS, Nic

WORD_BYTES: Final = 4
"""Of InfiniBand's data counters: one octet on each of four lanes."""
IN_BYTES_AT, OUT_BYTES_AT = 0, 8
"""Columns of /proc/net/dev."""


class Traffic(NamedTuple):
    """Bytes since the link came up."""

    in_bytes: int
    out_bytes: int


def traffic(nics: Iterable[Nic], root: Path = Path("/")) -> dict[str, Traffic]:
    """By the NIC's name; those whose counters cannot be read are left out. A few small files are read: some 20 us a NIC. Of no NIC none is:
    a node asks with each heartbeat."""
    nics = list(nics)
    interfaces = _interfaces(root) if nics else {}
    found: dict[str, Traffic] = {}
    for nic in nics:
        counted = [_of_port(nic.name, root)] if nic.kind in RDMA_KINDS else []
        if nic.kind != INFINIBAND:  # there IP goes by the port, too
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
    """Stripped; empty where it is not there or cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
