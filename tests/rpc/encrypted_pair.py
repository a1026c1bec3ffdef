"""The two ends of one connection over TLS, for tests of what is used over plain sockets as well."""

import socket

from kvstore.security.tls.certificates import SERVERS
from tests.security.tls.certified import certificates, shared


def tls_pair() -> tuple[socket.socket, socket.socket]:
    """(client, server), which know one another: over a Unix socket, which delivers at once."""
    far, near = socket.socketpair()
    client, server = certificates(shared().client()), certificates(shared().master())
    there = client.begin_to(far, "127.0.0.1", SERVERS)
    here = server.begin_from(near)
    while not all([there.has_shaken_hands(), here.has_shaken_hands()]):
        pass
    return there, here
