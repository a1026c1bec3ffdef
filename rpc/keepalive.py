"""Detection of dead peers over TCP: a host that loses power or its network closes no connection.

The kernel sends keepalive probes, and breaks a connection whose peer does not acknowledge sent data (TCP_USER_TIMEOUT).
Unix sockets need neither: the kernel closes a dead process's end.
"""

import math
import socket
from typing import Final

PEER_TIMEOUT_S: Final = 30.0
"""Default of the settings `peer_timeout_s`."""
MIN_PEER_TIMEOUT_S: Final = 1.0
"""The kernel's keepalive intervals are whole seconds."""
MAX_PEER_TIMEOUT_S: Final = 3600.0
PROBES: Final = 4
"""Unanswered probes, in the second half of the timeout, after which the peer is dead: single packets may be lost."""


def enable_keepalive(sock: socket.socket, timeout_s: float, *, limit_unacknowledged: bool) -> None:
    """Break the connection when its peer's host has acknowledged nothing for about `timeout_s`.

    No effect on a Unix socket.

    `limit_unacknowledged`: also when sent data stays unacknowledged or unread for that long. For daemons, which hold
    memory for it. Not for clients: a request may wait longer for free space at its node, and has its own deadline.
    """
    if sock.family == socket.AF_UNIX:
        return
    idle_s = max(1, math.floor(timeout_s / 2))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, math.floor((timeout_s - idle_s) / PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    if limit_unacknowledged:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def grpc_options(timeout_s: float) -> list[tuple[str, int]]:
    """Return options of a gRPC channel: calls fail when the peer's host has been silent for about `timeout_s`.

    The channel shares no connection with others.
    """
    half_ms = int(timeout_s * 500)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),  # for the peer's kernel to acknowledge
        ("grpc.http2.ping_timeout_ms", half_ms),  # for the peer itself; a minute where only the others are set
        # Channels of a process share connections to one address, and the back-off after a failure. Not this one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
