"""Connections of the control plane whose callers have not shown who they are: only so many of them, so that others find a place.

gRPC has a limit of connections, whoever has them: it neither tells of those that are there nor ends one. So they are looked for where they
are, among this process's own descriptors, by the port that they came to; the one that has been there longest is shut down, as gRPC
then finds. A stranger is who has made no call with a credential that is good; one who has is known for as long as his connection is.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
from collections import OrderedDict
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

DESCRIPTORS: Final = "/proc/self/fd"
KNOWN_SHARE: Final = 2
"""So many times the connections that there may be: those who called last are remembered, and who has gone is so forgotten."""

Peer = tuple[str, int]
log = logging.getLogger("kvstore.master")


class ControlStrangers:
    """See the module. `met` is for any thread, `look` for one."""

    def __init__(self, port: int, *, most: int, max_connections: int) -> None:
        """Of the connections to `port`, `most` may be strangers'."""
        self._port = port
        self._most = most
        self._max_known = KNOWN_SHARE * max_connections
        self._lock = threading.Lock()
        self._known: OrderedDict[Peer, None] = OrderedDict()
        self._seen: dict[int, Peer | None] = {}
        """Sockets by inode, longest here first, and whose they are: None for what is no connection of the control plane, or no more."""

    def met(self, peer: str) -> None:
        """Who calls from there (as gRPC has it: `ipv4:10.0.0.7:4711`) has shown who he is."""
        found = _peer(peer)
        if found is not None:
            with self._lock:
                self._known[found] = None
                self._known.move_to_end(found)
                if len(self._known) > self._max_known:
                    self._known.popitem(last=False)

    def look(self) -> int:
        """Hang up on the strangers who are too many; how many."""
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
        if len(descriptors) <= self._most:  # as it is nearly always: nobody need look who they are
            self._seen.clear()
            return 0
        sockets = _sockets(descriptors)
        self._seen = {inode: peer for inode, peer in self._seen.items() if inode in sockets}
        for inode, descriptor in sockets.items():
            if inode not in self._seen:
                self._seen[inode] = self._peer_of(descriptor, inode)
        with self._lock:
            strangers = [inode for inode, peer in self._seen.items() if peer is not None and peer not in self._known]
        late = strangers[: max(0, len(strangers) - self._most)]
        for inode in late:
            _shut_down(sockets[inode], inode)
            self._seen[inode] = None  # gRPC closes it in its own time
        if late:
            log.warning("hanging up on %d control connections: %d others have not shown who they are either", len(late), self._most)
        return len(late)

    def _peer_of(self, descriptor: int, inode: int) -> Peer | None:
        with contextlib.suppress(OSError, ValueError):
            with _held(descriptor, inode) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                    host, port = sock.getpeername()[:2]
                    return _address(host), port
        return None


def _sockets(descriptors: list[int]) -> dict[int, int]:
    """The descriptors that are sockets, by inode, by which one is known from the next of its number."""
    found = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed since
            told = os.fstat(descriptor)
            if stat.S_ISSOCK(told.st_mode):
                found[told.st_ino] = descriptor
    return found


def _held(descriptor: int, inode: int) -> socket.socket:
    """Another descriptor of that socket, which nobody else closes. Raises OSError: it is not there any more."""
    copy = os.dup(descriptor)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError("the descriptor is another socket's by now")
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _shut_down(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # its peer was quicker
        with _held(descriptor, inode) as sock:
            sock.shutdown(socket.SHUT_RDWR)


@lru_cache(maxsize=4096)
def _peer(told: str) -> Peer | None:
    """None of what is no TCP connection, such as a Unix socket."""
    host, _, port = unquote(told).partition(":")[2].rpartition(":")
    try:
        return _address(host.strip("[]")), int(port)
    except ValueError:
        return None


def _address(host: str) -> str:
    """One address one text: without its zone, and of a socket for both families as IPv4 has it. Raises ValueError."""
    found = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)
