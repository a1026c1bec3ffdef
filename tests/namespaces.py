"""Two hosts on one machine: network namespaces joined by rails, that is veth pairs, each a subnet of its own and shaped if wanted.

For tests and benchmarks of several NICs: rails are cut and restored, processes run on either host. Needs root, `ip` and `tc` (Debian:
iproute2) and `nft` (nftables). Delay and random loss are not supported: they need netem, which some
kernels lack.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Self

import pytest

PREFIX: Final = "kvstore-test"
"""Namespaces are called PREFIX-PID-COUNT-HOST."""
PACKAGES: Final = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
"""Program -> the Debian package that brings it."""
MTU_BYTES: Final = 9000
"""As fabrics of data centres have it: 99 % of a shaped rate is payload; of 1,500 bytes it would be 95 %."""
BURST_S: Final = 0.004
"""A shaper may be woken this late without losing rate; a burst below 64 KiB would also have it cut segmentation-offload packets."""
MIN_BURST_BYTES: Final = 256 << 10
QUEUE_S: Final = 0.02
COMMAND_DEADLINE_S: Final = 60.0
_count = itertools.count()


class Cut(Enum):
    """Kind of failure of a rail."""

    SILENT = "silent"
    """Links stay up and packets vanish in both directions, as behind a misconfigured switch, without a notification."""
    LINK_DOWN = "link down"
    """Host 1 takes its end down, so host 0 loses its carrier; connections stay open and new ones are refused by the kernel."""


@dataclass(frozen=True, slots=True)
class VethRail:
    """One veth pair. `device` is its name on both hosts; `addresses[host]` its IP address on each."""

    device: str
    addresses: tuple[str, str]


class TwoHosts:
    """Hosts 0 and 1 and the rails between them, from construction to `close`. A context manager. Not thread-safe."""

    def __init__(self, rates_gbit_s: Sequence[float]) -> None:
        """One rail for each rate, shaped to it at both ends; 0 leaves a rail unshaped. At most 250.

        Raises RuntimeError with what the failing program said; nothing is left behind then.
        """
        assert 0 < len(rates_gbit_s) <= 250, "one subnet a rail"
        number = next(_count)
        self.names = tuple(f"{PREFIX}-{os.getpid()}-{number}-{host}" for host in (0, 1))
        self.rails = [VethRail(f"rail{i}", (f"10.77.{i}.1", f"10.77.{i}.2")) for i in range(len(rates_gbit_s))]
        self._processes: list[subprocess.Popen[Any]] = []
        self._cuts: dict[int, Cut] = {}
        remove_leftovers()
        try:
            self._make(rates_gbit_s)
        except BaseException:
            self.close()
            raise

    def prefix(self, host: int) -> list[str]:
        """Return the prefix of a command line that runs it on that host."""
        return ["ip", "netns", "exec", self.names[host]]

    def start(self, host: int, command: Sequence[str], **popen: Any) -> "subprocess.Popen[Any]":
        """Start a process on that host, with Popen's own keywords. `close` kills it if it still runs."""
        self._processes.append(subprocess.Popen([*self.prefix(host), *command], **popen))
        return self._processes[-1]

    def run(self, host: int, command: Sequence[str], *, timeout_s: float = COMMAND_DEADLINE_S) -> str:
        """Run a command on that host; what it printed. Raises RuntimeError when it fails, subprocess.TimeoutExpired when it hangs."""
        return run([*self.prefix(host), *command], timeout_s=timeout_s)

    def cut(self, rail: int, kind: Cut = Cut.SILENT) -> None:
        """Have a rail that works carry nothing, from the return on."""
        assert rail not in self._cuts, "already cut"
        self._cuts[rail] = kind
        device = self.rails[rail].device
        if kind is Cut.LINK_DOWN:
            run(["ip", "-n", self.names[1], "link", "set", device, "down"])
            return
        # Dropped where it arrives: a packet dropped on its way out is an error that the sender's socket may see.
        rules = f"table inet cut_{device} {{ chain input {{ type filter hook input priority 0; iifname {device} drop; }}; }}"
        for host in (0, 1):
            self.run(host, ["nft", rules])

    def restore(self, rail: int) -> None:
        """Undo `cut`, of either kind."""
        kind = self._cuts.pop(rail)
        device = self.rails[rail].device
        if kind is Cut.LINK_DOWN:
            run(["ip", "-n", self.names[1], "link", "set", device, "up"])
            return
        for host in (0, 1):
            self.run(host, ["nft", "delete", "table", "inet", f"cut_{device}"])

    def close(self) -> None:
        """Kill what `start` started and remove namespaces and rails. A second close is a no-op."""
        for process in self._processes:
            with suppress(BrokenPipeError), process:
                process.kill()
        self._processes.clear()
        remove(self.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, rates_gbit_s: Sequence[float]) -> None:
        for name in self.names:
            run(["ip", "netns", "add", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        for rail in self.rails:
            ends = [["name", rail.device, "mtu", str(MTU_BYTES), "netns", name] for name in self.names]
            run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for rail, rate in zip(self.rails, rates_gbit_s, strict=True):
            for name, address in zip(self.names, rail.addresses, strict=True):
                run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", rail.device])
                run(["ip", "-n", name, "link", "set", rail.device, "up"])
                if rate:
                    run(["tc", "-n", name, "qdisc", "add", "dev", rail.device, "root", *shaper(rate)])


@contextmanager
def two_hosts(*rates_gbit_s: float) -> Iterator[TwoHosts]:
    """TwoHosts for a test, which is skipped where they cannot be had."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with TwoHosts(rates_gbit_s) as hosts:
        yield hosts


def why_not() -> str:
    """Why TwoHosts cannot be made here and what would help; "" when they can."""
    if os.geteuid():
        return "network namespaces need root"
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            return f"{program} is not on PATH (Debian: apt-get install {package})"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        run(["ip", "netns", "add", name])
        run(["ip", "netns", "delete", name])
    except RuntimeError as error:
        return f"this machine permits no network namespaces, as in a container without CAP_SYS_ADMIN: {error}"
    return ""


def namespaces() -> list[str]:
    """Names of all network namespaces of this machine."""
    return [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines()]


def remove(names: Sequence[str]) -> None:
    """Remove those of these namespaces that are there, and what leads to them."""
    present = namespaces()
    for name in names:
        if name in present:
            run(["ip", "netns", "delete", name])


def remove_leftovers() -> None:
    """Remove the namespaces of test processes that were killed before they could."""
    for name in namespaces():
        if name.startswith(f"{PREFIX}-") and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            with suppress(RuntimeError):  # another process that makes hosts has just removed it
                run(["ip", "netns", "delete", name])


def shaper(rate_gbit_s: float) -> list[str]:
    """The token bucket that TCP fills to its rate."""
    bytes_per_s = rate_gbit_s * 1e9 / 8
    burst_bytes = max(MIN_BURST_BYTES, int(bytes_per_s * BURST_S))
    limit_bytes = burst_bytes + int(bytes_per_s * QUEUE_S)
    return ["tbf", "rate", f"{int(rate_gbit_s * 1e9)}bit", "burst", f"{burst_bytes}b", "limit", f"{limit_bytes}b"]


def run(command: Sequence[str], *, timeout_s: float = COMMAND_DEADLINE_S) -> str:
    """Return the command's output. Raises RuntimeError with its error output, subprocess.TimeoutExpired at the timeout."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
