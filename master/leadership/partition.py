"""One partition of the key space at this master: its catalog, its role manager and its frame handler.

A master has all partitions: it owns some and follows the others. The catalog's notifications are passed from its
thread to the loop, one at a time and in order. The catalog's thread waits for each, so that the backlog stays in the
catalog and not in memory."""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.master.catalogs.interface import Candidate, Catalog, CatalogOwner, Change, Follower
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.leadership.leader import LeaderRole
from kvstore.master.leadership.role_manager import MasterRole, RoleManager
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.server.partition_router import StandbyFrames
from kvstore.protocol.errors import KVStoreError, typed
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Handler
from kvstore.security.authenticator import Authenticator

log = logging.getLogger("kvstore.master")


class EventLoopBridge:
    """A catalog's Follower that calls another one in the loop's thread. `close` belongs to that thread."""

    def __init__(self, reactor: Reactor, follower: Follower, *, on_failure: Callable[[KVStoreError], None]) -> None:
        """`on_failure` is called in the loop's thread if the follower fails, for example on a damaged record or
        without memory. Nothing is passed on after that, since the follower misses a change."""
        self._reactor = reactor
        self._follower = follower
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting = threading.Event()

    def begin(self) -> None:
        self._carry(self._follower.begin)

    def take(self, changes: Sequence[Change]) -> None:
        self._carry(lambda: self._follower.take(changes))

    def owned_by(self, owner: CatalogOwner | None) -> None:
        self._carry(lambda: self._follower.owned_by(owner))

    def elected(self, epoch: int) -> None:
        self._carry(lambda: self._follower.elected(epoch))

    def deposed(self, why: KVStoreError) -> None:
        self._carry(lambda: self._follower.deposed(why))

    def close(self) -> None:
        """Pass on nothing more. A waiting call returns, so that the loop can join the catalog's thread."""
        with self._lock:
            self._is_closed = True
            self._waiting.set()

    def _carry(self, call: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                if not self._is_closed:
                    call()
            except Exception as error:
                self.close()
                if not isinstance(error, KVStoreError):
                    log.exception("a notification of the catalog failed")
                self._on_failure(typed(error))
            finally:
                done.set()

        with self._lock:
            if self._is_closed:
                return
            self._waiting = done
        self._reactor.call_soon(run)
        done.wait()  # until the loop has run it, or `close`


class PartitionHost(Protocol):
    """The master of a partition. Called in its loop."""

    def lead(self, partition: "Partition", epoch: int, followed: FollowedRecords) -> LeaderRole:
        """Make the owner of an epoch, on the followed records."""

    def changed(self, partition: "Partition") -> None:
        """The partition's role, or its owner, has changed."""

    def failed(self, error: KVStoreError) -> None:
        """The catalog cannot be followed."""


class Partition:
    """One partition at this master. The loop is the only caller."""

    def __init__(self, index: int, catalog: Catalog, me: Candidate, master: MasterParts, host: PartitionHost) -> None:
        self.index = index
        self.catalog = catalog
        self._me = me
        what = "the catalog" if master.settings.partitions == 1 else f"partition {index} of the catalog"
        self.role_manager = RoleManager(me.address, functools.partial(host.lead, self), on_change=lambda: host.changed(self), what=what)
        self._bridge = EventLoopBridge(master.reactor, self.role_manager, on_failure=host.failed)
        self._standby: StandbyFrames | None = None
        self.was_owner = False

    def follow(self, reachable: MasterContactInfo, authenticator: Authenticator) -> None:
        """Follow the catalog and campaign. Until elected, clients and nodes are redirected to the owner."""
        self._standby = StandbyFrames(lambda: self.role_manager.owner, reachable, authenticator)
        self.catalog.follow(self._me, self._bridge)

    @property
    def handler(self) -> Handler:
        """The current handler of its frames."""
        assert self._standby is not None
        return self._standby if self.role_manager.role is MasterRole.FOLLOWING else self.role_manager.readable_leader().frames

    def owner(self) -> CatalogOwner | None:
        """The current owner, as far as this master knows."""
        if self.role_manager.role is MasterRole.OWNER:
            return CatalogOwner(*self._me, self.role_manager.leader().epoch)
        return self.role_manager.owner

    def stop(self, why: KVStoreError) -> None:
        """Stop following the catalog, and fail waiting calls."""
        self._bridge.close()
        self.role_manager.close(why)
