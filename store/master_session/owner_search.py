"""Search for the master that owns a partition, before a registration and while its link lasts.

A master that claims to be the owner and then accepts no registration is tried last the next time. A master that does
not answer gets a longer deadline each time.
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
    """Owner search of one link. Used by one thread at a time. Channels it returns have sent their Hello; the caller
    closes them."""

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
        """`hello` makes the Hello of an unregistered node. A single master has `timeout_s` to answer; one of several
        has `patience_s`, and more after each failure, up to `timeout_s`."""
        self._masters = Masters(masters, clock_ns=clock_ns)
        self._hello = hello
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._tls = tls
        self._doubtful: Address | None = None
        """Master that claimed to be the owner and has not accepted the registration yet."""

    def find(self) -> Channel:
        """Return a connection to the owner. Raises KVStoreError."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None:
            with contextlib.suppress(KVStoreError):
                return self._query_masters(besides=doubtful)
        return self._query_masters()

    def another(self) -> Channel | None:
        """Return a connection to an owner other than the last one found, or None."""
        if not self._masters.has_several:
            return None
        try:
            return self._query_masters(besides=self._masters.owner)
        except KVStoreError:
            return None

    def prefer_unix(self, channel: Channel) -> tuple[Channel, str]:
        """Return the connection, replaced by one to the owner's Unix socket if that is possible without a certificate,
        and the control plane's address as reported over TCP: the peer of a socket file need not share our loopback. The
        owner is doubtful until `confirm_owner`."""
        control_address = channel.welcome.control
        found = channel if channel.address.unix else self._over_unix(channel)
        self._doubtful = self._masters.owner
        return found, control_address

    def confirm_owner(self) -> None:
        """The owner has accepted the registration."""
        self._doubtful = None

    def _query_masters(self, *, besides: Address | None = None) -> Channel:
        """Query all masters once."""
        masters = self._masters
        attempt_s = min(self._timeout_s, self._patience_s) if masters.has_several else self._timeout_s
        deadline = Deadline(self._timeout_s * (len(masters.in_order()) + MAX_NAMED))
        return find_owner(
            masters, self._hello(), deadline, attempt_s=attempt_s, max_attempt_s=self._timeout_s, besides=besides, tls=self._tls
        )

    def _over_unix(self, channel: Channel) -> Channel:
        """Return a connection to the same master over its Unix socket if that is reachable and TLS is off, else
        `channel`. A Unix socket presents no certificate."""
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
