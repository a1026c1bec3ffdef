"""How a connection over TCP finds out that its peer's host is gone: a host that loses power or its network says no goodbye.

The kernel asks on the connection's behalf (keepalive), and gives up one whose peer does not acknowledge what was sent (user timeout). Who
waits on the socket then finds it broken. Unix sockets need neither: their peers are of this kernel, which tells of their end.
"""

import math
import socket
from typing import Final

PEER_TIMEOUT_S: Final = 30.0
"""The default of the settings `peer_timeout_s`."""
MIN_PEER_TIMEOUT_S: Final = 1.0
"""The kernel counts the pauses of keepalive in whole seconds."""
MAX_PEER_TIMEOUT_S: Final = 3600.0
PROBES: Final = 4
"""Unanswered ones after which the peer is gone, within the second half of the timeout: one packet may be lost."""


def notice_vanished_host(sock: socket.socket, timeout_s: float, *, gives_up_unread: bool) -> None:
    """Have the connection break when its peer's host has acknowledged nothing for about `timeout_s`. A Unix socket is left as it is.

    `gives_up_unread`: also when what was sent stays unacknowledged, or unread, for that long. For daemons, which hold memory for it; a
    client's request may wait that long for room at its node, and has a deadline of its own.
    """
    if sock.family == socket.AF_UNIX:
        return
    idle_s = max(1, math.floor(timeout_s / 2))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, math.floor((timeout_s - idle_s) / PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    if gives_up_unread:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def grpc_options(timeout_s: float) -> list[tuple[str, int]]:
    """For a gRPC channel of its own: while a call is under way, its peer's host is asked whether it is there, and the call ends when it has
    said nothing for about `timeout_s`."""
    half_ms = int(timeout_s * 500)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),  # for the peer's kernel to acknowledge
        ("grpc.http2.ping_timeout_ms", half_ms),  # for the peer itself; a minute where only the others are set
        # Within a process, connections to one address are shared, and with them the pause after a failure. Not this one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
