"""Several hosts on one machine: network namespaces around a router namespace, which drops packets by its rules.

Partitions are rules in one place: the router drops packets from one host to another, and neither end is notified.
The requirements are those of tests/namespaces.py. Nothing leaves the machine: the router leads to these hosts only.
"""

import itertools
import os
import subprocess
import threading
from collections.abc import Iterable
from typing import Any, Final, Self

from tests.entering import enter_network
from tests.namespaces import COMMAND_DEADLINE_S, PREFIX, remove, remove_leftovers, run

NET: Final = "10.88"
_count = itertools.count()


class StarHosts:
    """`count` hosts, from construction to `close`. A context manager. Methods may be called from any thread."""

    def __init__(self, count: int) -> None:
        """Raises RuntimeError with what the failing program said; nothing is left behind then."""
        start = f"{PREFIX}-{os.getpid()}-star{next(_count)}"
        self.names = [f"{start}-{host}" for host in range(count)]
        self._router = f"{start}-router"
        self._lost: dict[tuple[int, int], int] = {}
        """(from, to), and by how many cuts."""
        self._lock = threading.Lock()
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"{NET}.{host}.2"

    def prefix(self, host: int) -> tuple[str, ...]:
        """Return the prefix of a command line that runs it on that host."""
        return ("ip", "netns", "exec", self.names[host])

    def enter(self, host: int) -> None:
        """Have the calling thread be on that host, see `enter_network`."""
        enter_network(self.names[host])

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Lose all packets from the one to the other host of each pair, from the return on. A pair that is cut twice
        must be mended twice."""
        self._change(pairs, 1)

    def mend(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Undo a `cut`."""
        self._change(pairs, -1)

    def ways(self, host: int) -> list[tuple[int, int]]:
        """All that lead to the host and away from it."""
        others = [other for other in range(len(self.names)) if other != host]
        return [(host, other) for other in others] + [(other, host) for other in others]

    def close(self) -> None:
        """Remove the hosts. The caller ends the processes that run there. A second close is a no-op."""
        remove((*self.names, self._router))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        for name in (*self.names, self._router):
            run(["ip", "netns", "add", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        for host, name in enumerate(self.names):
            run(["ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"host{host}", "netns", self._router])
            for where, device, address in ((name, "eth0", self.address(host)), (self._router, f"host{host}", f"{NET}.{host}.1")):
                run(["ip", "-n", where, "address", "add", f"{address}/24", "dev", device])
                run(["ip", "-n", where, "link", "set", device, "up"])
            run(["ip", "-n", name, "route", "add", f"{NET}.0.0/16", "via", f"{NET}.{host}.1"])
        run(["ip", "netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        self._tell_router()

    def _change(self, pairs: Iterable[tuple[int, int]], by: int) -> None:
        with self._lock:
            for pair in pairs:
                self._lost[pair] = self._lost.get(pair, 0) + by
                assert self._lost[pair] >= 0, "mended more often than cut"
            self._tell_router()

    def _tell_router(self) -> None:
        """All rules at once: the kernel replaces them in one step."""
        rules = " ".join(f"ip saddr {self.address(a)} ip daddr {self.address(b)} drop;" for (a, b), count in self._lost.items() if count)
        table = f"table ip cuts {{ chain forward {{ type filter hook forward priority 0; {rules} }}; }}"
        command = ["ip", "netns", "exec", self._router, "nft", "-f", "-"]
        text = f"table ip cuts {{}}; delete table ip cuts; {table}"
        done: subprocess.CompletedProcess[Any] = subprocess.run(
            command, input=text.replace("; ", ";\n"), capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"nft: {done.stderr.strip()}")
