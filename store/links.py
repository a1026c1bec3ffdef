"""A node's ties to its masters: a link and a session for each partition of the key space.

Partition 0's comes first. Its master tells how many partitions there are and gives the node its id, which the node says to the others.
"""

import threading
from collections.abc import Callable

from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.link import MasterLink
from kvstore.store.mastering import MasterSession


class Links:
    """`describe` may be called from any thread; the rest is for the node's loop."""

    def __init__(
        self,
        partitioning: Partitioning,
        *,
        make_session: Callable[[int], MasterSession],
        make_link: Callable[[int, MasterSession], MasterLink],
        on_cut: Callable[[], None],
    ) -> None:
        """`on_cut` is called once it is known that there are several partitions, before anything is made for the others."""
        self._partitioning = partitioning
        self._make_session = make_session
        self._make_link = make_link
        self._on_cut = on_cut
        self._is_cut = False
        self.node_id = 0
        """By which partition 0's master knows the node; 0: not yet."""
        self._describing = threading.Lock()
        self._described: dict[str, bytes] = {}
        """What masters were told last of the host's topology and of the way to the transfer engine. Under the lock, as is what links
        there are: those that come are told the newest."""
        self._sessions = [make_session(0)]
        self._links = [make_link(0, self._sessions[0])]

    def start(self) -> None:
        for link in self._links:
            link.start()

    def describe(self, *, topology: bytes, transfer: bytes) -> None:
        """Have every master told."""
        with self._describing:
            self._described = {"topology": topology, "transfer": transfer}
            for link in self._links:
                link.describe(topology=topology, transfer=transfer)

    def beat(self) -> None:
        """Have every master told at once what heartbeats tell."""
        for link in self._links:
            link.describe()

    def registered(self, count: int, node_id: int) -> None:
        """Partition 0's master knows the node by this id, and there are so many partitions: each has a link from now on. Raises
        ConfigError: there were others; RuntimeError where no thread is to be had. The next registration makes and starts what is
        missing then."""
        self._partitioning.tell(count)
        is_other, self.node_id = node_id != self.node_id, node_id
        if count > 1 and not self._is_cut:
            self._on_cut()
            self._is_cut = True
        for partition in range(len(self._links), count):
            session = self._make_session(partition)
            link = self._make_link(partition, session)
            with self._describing:
                link.describe(**self._described)
                self._links.append(link)
            self._sessions.append(session)
        for link in self._links[1:]:
            if not link.is_started:
                link.start()
            elif is_other:
                link.renew()

    def lost(self, partition: int, registration_epoch: int) -> None:
        """The session of the partition has ended."""
        self._links[partition].lost(registration_epoch)

    def stopping(self, then: Callable[[], None], deadline_s: float) -> None:
        """Announce to every master that this process ends, and call `then` once all have answered, after `deadline_s` at the latest."""
        waiting = len(self._sessions)

        def answered() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                then()

        for session in list(self._sessions):
            session.stopping(answered, deadline_s)

    def stop(self) -> None:
        """No master is looked for any more."""
        for link in self._links:
            link.stop()

    def close(self) -> None:
        for session in self._sessions:
            session.close()
