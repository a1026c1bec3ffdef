"""Connecting to an address with a deadline, and with TLS where that is spoken: what blocking channels begin with."""

import errno
import socket
from typing import TYPE_CHECKING

from kvstore.protocol.errors import KVStoreError, TooManyConnections, Unavailable
from kvstore.rpc.address import Address, connect
from kvstore.rpc.deadline import Deadline

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates


def connect_to(address: Address, tls: "Certificates | None", deadline: Deadline) -> socket.socket:
    """A connected blocking socket; over TCP, with `tls` that connects, after its handshake. Raises Unavailable, DeadlineExceeded,
    Untrusted."""
    try:
        sock = connect(address, timeout_s=deadline.left_s())
        if tls is not None and tls.connects and not address.unix:
            return tls.connect(sock, address.host, deadline.left_s())
    except KVStoreError:
        raise
    except TimeoutError:
        raise deadline.exceeded() from None
    except OSError as error:
        raise not_connected(address, error) from None
    return sock


def not_connected(address: Address, error: OSError) -> Unavailable:
    """The error of an attempt to connect that failed with `error`: TooManyConnections where this process is out of descriptors."""
    kind = TooManyConnections if error.errno in (errno.EMFILE, errno.ENFILE) else Unavailable
    return kind(f"cannot connect to {address}: {error.strerror or error}")
