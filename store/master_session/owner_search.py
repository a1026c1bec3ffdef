"""Which of the masters owns a partition of the key space: looked for before a node registers, and while its link lasts.

A master that says that it is the owner and then takes no registration is doubted: the others are asked first the next time. Each time that
one does not answer it is given longer.
"""

import contextlib
from collections.abc import Callable, Sequence

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.address import Address, is_local_socket
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.owners import MAX_NAMED, Masters, find_owner
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates


class OwnerSearch:
    """One thread at a time: the link's. The channels that it gives are introduced, and the caller's to close."""

    def __init__(
        self,
        masters: Sequence[Address],
        hello: Callable[[], Hello],
        *,
        timeout_s: float,
        patience_s: float,
        tls: Certificates | None,
        clock_ns: Callable[[], int],
    ) -> None:
        """`hello` makes what a node says that has no registration yet. A single master has `timeout_s` to answer, one of several
        `patience_s`, and as much longer for each time that it has not, up to `timeout_s`."""
        self._masters = Masters(masters, clock_ns=clock_ns)
        self._hello = hello
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._tls = tls
        self._doubtful: Address | None = None
        """Of a master that says that it is the owner and took no registration: another one may own the catalog by now."""

    def find(self) -> Channel:
        """A connection to the master that owns the catalog. Raises KVStoreError."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None:
            with contextlib.suppress(KVStoreError):
                return self._ask_masters(besides=doubtful)
        return self._ask_masters()

    def another(self) -> Channel | None:
        """A connection to another master than the last one found, if one says that it owns the catalog."""
        if not self._masters.has_several:
            return None
        try:
            return self._ask_masters(besides=self._masters.owner)
        except KVStoreError:
            return None

    def nearest(self, channel: Channel) -> tuple[Channel, str]:
        """The connection to the owner, through its Unix socket where that is to be had and no certificate is shown, and the address of its
        control plane: as told over TCP, since who shares a socket file with us need not share our loopback. The owner is doubted from now
        on until `has_taken_us`."""
        place = channel.welcome.control
        found = channel if channel.address.unix else self._nearer(channel)
        self._doubtful = self._masters.owner
        return found, place

    def has_taken_us(self) -> None:
        """There is a link."""
        self._doubtful = None

    def _ask_masters(self, *, besides: Address | None = None) -> Channel:
        """One round."""
        masters = self._masters
        attempt_s = min(self._timeout_s, self._patience_s) if masters.has_several else self._timeout_s
        deadline = Deadline(self._timeout_s * (len(masters.in_order()) + MAX_NAMED))
        return find_owner(
            masters, self._hello(), deadline, attempt_s=attempt_s, max_attempt_s=self._timeout_s, besides=besides, tls=self._tls
        )

    def _nearer(self, channel: Channel) -> Channel:
        """The same master through its Unix socket, where that is to be had; else the channel as it is: with TLS, too, for a Unix socket
        shows no certificate."""
        there = channel.welcome
        if self._tls is not None or not is_local_socket(there.unix, there.host_id):
            return channel
        try:
            local = Channel.open(Address(unix=there.unix), self._hello(), Deadline(self._timeout_s))
        except KVStoreError:  # gone since: TCP does as well
            return channel
        if (local.welcome.server, local.welcome.host_id, local.welcome.epoch) != (there.server, there.host_id, there.epoch):
            local.close()
            return channel
        channel.close()
        return local
