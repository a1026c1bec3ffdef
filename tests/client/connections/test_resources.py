"""Shared resources of a client, as its settings define them."""

import os
import re
from pathlib import Path

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.connections.resources import ClientResources, maps_memory
from kvstore.client.connections.slabs import SlabKey
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.mapped_memory import HUGE_PAGE_BYTES
from tests.client.oracle import MASTER, Oracle, OracleNode, is_here


@pytest.mark.parametrize(
    ("transports", "maps"), [("auto", True), ("tcp, shm", True), ("shm", True), ("tcp", False), ("ucx,nixl", False), ("my:shm", False)]
)
def test_a_client_maps_memory_unless_its_transports_leave_it_out(node: OracleNode, transports: str, maps: bool) -> None:
    transfer = TransferSettings(transports=transports)
    assert maps_memory(transfer) is maps
    oracle = Oracle(node)
    oracle.resources = ClientResources(ClientSettings(master=MASTER), transfer, is_here=is_here, spread=0)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    assert oracle.resources.daemons.nodes.is_local(1) is maps


def test_slabs_are_mapped_asking_for_huge_pages(node: OracleNode) -> None:
    resources = ClientResources(ClientSettings(master=MASTER), TransferSettings(), is_here=is_here, spread=0)
    fd = os.memfd_create("slab")
    os.truncate(fd, HUGE_PAGE_BYTES)
    name, key = os.readlink(f"/proc/self/fd/{fd}"), SlabKey(1, 1, 1, True)
    resources.mapping.slabs.map_now([(key, fd, HUGE_PAGE_BYTES)])
    [flags] = re.findall(rf"{re.escape(name)}\n(?:.*\n)*?VmFlags:(.*)$", Path("/proc/self/smaps").read_text(), re.M)
    assert "hg" in flags.split()
    resources.close()
