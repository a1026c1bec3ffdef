"""One partition of the key space at this master: its catalog, what this master is there, and who serves its frames.

A master has all partitions, each for itself: it owns some and follows the others. The loop is the only caller.
"""

import functools
from collections.abc import Callable

from kvstore.master.catalogs.interface import Candidate, Catalog, Owner
from kvstore.master.directory.following import Followed
from kvstore.master.frames.service import Reachable
from kvstore.master.frames.standby import StandbyFrames
from kvstore.master.roles.leading import Leading
from kvstore.master.roles.relay import Relay
from kvstore.master.roles.standing import Role, Standing
from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.session import Handler
from kvstore.security.guard import Guard


class Partition:
    """See the module."""

    def __init__(
        self,
        index: int,
        catalog: Catalog,
        me: Candidate,
        reactor: Reactor,
        *,
        lead: Callable[["Partition", int, Followed], Leading],
        on_change: Callable[["Partition"], None],
        on_failure: Callable[[KVStoreError], None],
        what: str,
    ) -> None:
        """`lead` makes the owner of an epoch on what was followed. `on_change` is called at each change of the role or of the owner,
        `on_failure` when the catalog cannot be followed. `what` it is, for the log."""
        self.index = index
        self.catalog = catalog
        self._me = me
        self.standing = Standing(me.address, functools.partial(lead, self), on_change=lambda: on_change(self), what=what)
        self._relay = Relay(reactor, self.standing, on_failure=on_failure)
        self._standby: StandbyFrames | None = None
        self.was_owner = False

    def follow(self, reachable: Reachable, guard: Guard) -> None:
        """Stand for election. While this master is not the owner, who comes is told who is, and how this one is reached."""
        self._standby = StandbyFrames(lambda: self.standing.owner, reachable, guard)
        self.catalog.follow(self._me, self._relay)

    @property
    def handler(self) -> Handler:
        """Who serves its frames now."""
        assert self._standby is not None
        return self._standby if self.standing.role is Role.FOLLOWING else self.standing.answering().frames

    def owner(self) -> Owner | None:
        """Who owns it, as far as this master knows."""
        if self.standing.role is Role.OWNER:
            return Owner(*self._me, self.standing.leading().epoch)
        return self.standing.owner

    def stop(self, why: KVStoreError) -> None:
        """Nothing is taken from the catalog any more, and who waits for it is told."""
        self._relay.close()
        self.standing.close(why)
