"""Watches links: re-reads the topology when the kernel reports a change of a link or address, and periodically.

`changes` compares two topologies and is pure. The interval is needed because the kernel does not report every change
(an InfiniBand port without an interface), and none at all if netlink is not permitted.
"""

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.protocol.errors import KVStoreError
from kvstore.transfer.topology.model import Nic, Topology
from kvstore.transfer.topology.netlink import drain, open_changes

log = logging.getLogger("kvstore.transfer")


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A NIC's state before and after; None if it did not exist."""

    before: Nic | None
    after: Nic | None

    def __str__(self) -> str:
        before, after = self.before, self.after
        if before is None or after is None:
            nic = before or after
            assert nic is not None
            return f"{nic.name} {'appeared' if before is None else 'disappeared'}"
        if before.is_up != after.is_up:
            return f"{after.name} went {'up' if after.is_up else 'down'}"
        if before.addresses != after.addresses:
            return f"{after.name} has the addresses {', '.join(after.addresses) or 'none'}"
        if before.speed_gbit_s != after.speed_gbit_s:
            return f"{after.name} runs at {after.speed_gbit_s:g} Gbit/s"
        return f"{after.name} is another device"


def changes(before: Topology, after: Topology) -> list[LinkChange]:
    """Return the differences between the NICs, by name."""
    old, new = ({nic.name: nic for nic in topology.nics} for topology in (before, after))
    return [LinkChange(old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


class LinkWatch:
    """Reads the topology once when made; from `start` to `close` its thread keeps `topology` current. Thread-safe."""

    def __init__(
        self,
        read_topology: Callable[[], Topology],
        on_change: Callable[[Topology, list[LinkChange]], None],
        *,
        poll_interval_s: float,
        on_unchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """`read_topology` is Discovery.read_topology. Its error is raised here; later errors are logged and retried.

        `on_change` is called in the thread, after `topology` is updated; `on_unchanged` after each read without a
        change, for other state. Neither may call `close`.
        """
        self._read_topology = read_topology
        self._on_change = on_change
        self._otherwise = on_unchanged
        self._poll_interval_s = poll_interval_s
        self._topology = read_topology()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="link-watch", daemon=True)

    @property
    def topology(self) -> Topology:
        """The topology of the last read."""
        return self._topology

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; no callback runs afterwards. A second close is a no-op."""
        if self._wake_fd < 0:
            return
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_fd)
        self._wake_fd = -1

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(self._wake_fd, select.POLLIN)
            changed = self._listen()
            if changed is not None:
                stack.enter_context(changed)
                poll.register(changed, select.POLLIN)
            while not self._stopping.is_set():
                self._refresh()  # also before the first wait: a change may have been missed since the first read
                poll.poll(self._poll_interval_s * 1000)
                if changed is not None:
                    drain(changed)

    def _listen(self) -> socket.socket | None:
        try:
            return open_changes()
        except OSError as error:
            log.warning("netlink notifications are not available (%s): links are polled every %g s", error.strerror, self._poll_interval_s)
            return None

    def _refresh(self) -> None:
        try:
            after = self._read_topology()
            self._last_error = ""
        except KVStoreError as error:
            if str(error) != self._last_error:  # log a lasting error once
                log.warning("cannot read the links: %s", error)
            self._last_error = str(error)
            return
        found = changes(self._topology, after)
        if found:
            self._topology = after
            log.info("links: %s", "; ".join(map(str, found)))
        try:
            if found:
                self._on_change(after, found)
            else:
                self._otherwise()
        except Exception:
            log.exception("a callback of link changes failed")
