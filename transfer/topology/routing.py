"""Which of this host's rails leads to a peer's: the kernel's own choice, asked without sending anything."""

import ipaddress
import socket
from collections.abc import Sequence

from kvstore.transfer.agent import Rail


def local_address_towards(address: str) -> str:
    """The address that this host would speak to `address` from; "" when there is no route. No packet is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:  # also where the kernel has no IPv6
        return ""


def reaches(local: Rail, remote: Rail, locals: Sequence[Rail], *, same_host: bool) -> bool:
    """Whether the local rail is a way to the remote one.

    Between IP addresses it is if the kernel routes that way; if it routes by none of our rails, all may be tried. Rails without
    addresses reach every other. The loopback reaches this host only.
    """
    if not local.address or not remote.address:
        return True
    if (":" in local.address) != (":" in remote.address):
        return False
    if not same_host and (ipaddress.ip_address(remote.address).is_loopback or ipaddress.ip_address(local.address).is_loopback):
        return False
    if ipaddress.ip_address(remote.address).is_loopback:
        return True
    towards = local_address_towards(remote.address)
    return towards == local.address or towards not in [rail.address for rail in locals]
