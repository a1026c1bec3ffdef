"""Free loopback ports for daemons that need a fixed port, also after a restart, and ports without a listener.

They are below the kernel's ephemeral ports, so that no outgoing connection takes the port of a daemon that restarts. Each test process
holds a range of its own while it lives.
"""

import contextlib
import random
import socket
from functools import cache
from pathlib import Path
from typing import Final

RANGE_PORTS: Final = 256
_LOWEST: Final = 1024


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive free ports. They are returned again only after all others of the range."""
    return _own().take(count)


class _Range:
    """Range of ports, locked by an abstract Unix socket. The kernel frees the lock with the process; abstract names and ports are both
    per network namespace."""

    def __init__(self) -> None:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for begin in range(max(_LOWEST, first_outgoing // 2), first_outgoing - RANGE_PORTS + 1, RANGE_PORTS):
            with contextlib.suppress(OSError):  # another process has it
                self._name.bind(f"\0kvstore-tests-{begin}")
                self._ports = range(begin, begin + RANGE_PORTS)
                break
        else:
            raise RuntimeError(f"other test processes hold all port ranges below {first_outgoing}")
        self._next = random.randrange(RANGE_PORTS)

    def take(self, count: int) -> list[int]:
        for _ in self._ports:
            if self._next + count > RANGE_PORTS:
                self._next = 0
            run = self._ports[self._next : self._next + count]
            self._next += count
            if all(_is_free(port) for port in run):
                return list(run)
        raise RuntimeError(f"no {count} ports in a row are free in {self._ports}")


@cache
def _own() -> _Range:
    return _Range()


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
