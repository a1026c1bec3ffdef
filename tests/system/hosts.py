"""Flags of daemons on hosts of their own (network namespaces), where every client may come."""

from pathlib import Path

from kvstore.rpc.address import Address

MASTER, CONTROL, NODE = 7440, 7442, 7443


def master_flags(address: str, folder: Path, *, control: str = "127.0.0.1") -> list[str]:
    """Of a master at this address of a host."""
    places = ["--listen", str(Address(address, MASTER)), "--control", str(Address(control, CONTROL))]
    return ["--allow-unauthenticated", *places, "--run-dir", str(folder), "--catalog", "memory:"]


def node_flags(master: str, address: str, name: str, folder: Path) -> list[str]:
    """Of a node at this address of a host."""
    return [
        "--allow-unauthenticated",
        "--master",
        master,
        "--listen",
        str(Address(address, NODE)),
        "--name",
        name,
        "--run-dir",
        str(folder),
    ]
