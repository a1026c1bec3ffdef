"""Which rail leads to which peer, asked of this machine's own kernel with its own addresses."""

import pytest

from kvstore.transfer.agent import Rail
from kvstore.transfer.paths.rails import local_address_towards, reaches
from kvstore.transfer.topology.discovery import Discovery

LOOPBACK = Rail("lo", "127.0.0.1")
NOWHERE = "192.0.2.254"
"""Of TEST-NET-1: nobody's."""


def own_addresses(version: int) -> list[str]:
    usable = [address for nic in Discovery().look().nics if nic.is_usable for address in nic.addresses]
    return [address for address in usable if (":" in address) == (version == 6)]


@pytest.mark.parametrize("version", [4, 6])
def test_this_host_is_reached_from_its_own_addresses(version: int) -> None:
    for address in own_addresses(version):
        assert local_address_towards(address) == address


def test_rails_without_addresses_reach_every_other() -> None:
    assert reaches(Rail(), LOOPBACK, [], same_host=False)
    assert reaches(LOOPBACK, Rail(), [], same_host=False)


def test_the_loopback_reaches_this_host_only() -> None:
    outside = Rail("eth0", NOWHERE)
    for local, remote in ((LOOPBACK, LOOPBACK), (LOOPBACK, outside), (outside, LOOPBACK)):
        assert not reaches(local, remote, [local], same_host=False)
    for address in own_addresses(4):
        assert reaches(LOOPBACK, Rail("any", address), [LOOPBACK], same_host=True)
        assert reaches(Rail("any", address), LOOPBACK, [Rail("any", address)], same_host=True)


def test_the_kernels_choice_is_the_way_and_the_other_rails_are_not() -> None:
    chosen, other = Rail("eth0", local_address_towards(NOWHERE) or "127.0.0.2"), Rail("eth1", "192.0.2.77")
    remote = Rail("eth0", NOWHERE if local_address_towards(NOWHERE) else "127.0.0.2")
    assert reaches(chosen, remote, [chosen, other], same_host=True)
    if chosen.address != "127.0.0.2":
        assert not reaches(other, remote, [chosen, other], same_host=True)
    assert reaches(other, remote, [other], same_host=True), "none of our rails is the kernel's choice: all may be tried"
