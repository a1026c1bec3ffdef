"""TCP ports of the loopback for daemons that are told their port, and that come back on it after a kill; also ports where nobody listens.

They lie below those that the kernel gives to outgoing connections and to whoever asks for any port: one of these could else take the port
of a daemon that is about to start again. So could another process that runs tests: each has a range of its own while it lives.
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
    """`count` ports that nobody uses now, each one more than the one before. They are not given out again before all others were."""
    return _own().take(count)


class _Range:
    """Consecutive ports, held against other processes by a socket of the abstract namespace: the kernel gives it up with this process, and
    each network namespace has names of its own, as it has ports."""

    def __init__(self) -> None:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for begin in range(max(_LOWEST, first_outgoing // 2), first_outgoing - RANGE_PORTS + 1, RANGE_PORTS):
            with contextlib.suppress(OSError):  # another process has it
                self._name.bind(f"\0kvstore-tests-{begin}")
                self._ports = range(begin, begin + RANGE_PORTS)
                break
        else:
            raise RuntimeError(f"every range of ports below {first_outgoing} is held by other processes that run tests")
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
