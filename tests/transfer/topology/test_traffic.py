"""Promises of traffic.py: the kernel's counters of a machine in a folder, and of this host."""

from pathlib import Path

import pytest

from kvstore.transfer.topology.model import ETHERNET, INFINIBAND, ROCE, Nic
from kvstore.transfer.topology.traffic import Traffic, traffic

HEAD = "Inter-|   Receive                    |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"


def dev(root: Path, **counts: tuple[int, int]) -> None:
    (root / "proc/net").mkdir(parents=True)
    lines = [f"{name:>6}: {told[0]:>7} 1 0 0 0 0 0 0 {told[1]:>7} 1 0 0 0 0 0 0\n" for name, told in counts.items()]
    (root / "proc/net/dev").write_text(HEAD + "".join(lines) + "broken: 1\n")


def port(root: Path, device: str, number: str, received: str, sent: str) -> None:
    folder = root / "sys/class/infiniband" / device / "ports" / number / "counters"
    folder.mkdir(parents=True)
    (folder / "port_rcv_data").write_text(received + "\n")
    (folder / "port_xmit_data").write_text(sent + "\n")


@pytest.mark.promise("observable")
def test_traffic_counts_interface_and_port_bytes(tmp_path: Path) -> None:
    dev(tmp_path, eth0=(100, 200), eth1=(1000, 2000), ib0=(7, 7))
    port(tmp_path, "mlx5_1", "1", "10", "20")
    port(tmp_path, "mlx4_0", "2", "3", "4")
    nics = [
        Nic("eth0", ETHERNET, "eth0"),
        Nic("mlx5_1", ROCE, "eth1"),
        Nic("mlx4_0:2", INFINIBAND, "ib0"),
    ]
    assert traffic(nics, tmp_path) == {
        "eth0": Traffic(100, 200),
        "mlx5_1": Traffic(1040, 2080),
        "mlx4_0:2": Traffic(12, 16),
    }
