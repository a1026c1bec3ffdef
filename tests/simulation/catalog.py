"""The catalog on the model of etcd (etcd.py), as a process of a world has it.

It keeps the promises of kvstore.master.catalogs.interface (tests/simulation/test_etcd.py holds it to the suite of the real one), between
processes of a world: what is asked may be lost on its way there or back, and then it is not known whether it was done.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar

from kvstore.master.catalogs.group_commit import check_changes
from kvstore.master.catalogs.interface import Candidate, Catalog, CatalogOwner, Change, Done, Follower
from kvstore.protocol.errors import CatalogUnavailable, Closed, KVStoreError, StaleEpoch
from tests.simulation.etcd import HOST, LEASE_NS, Etcd
from tests.simulation.world import MS, S, Thread

TIMEOUT_NS: Final = S // 2
POLL_NS: Final = S // 4
LOOK_NS: Final = S // 2
"""Interval at which a master reports that it is alive and reads the list of live masters."""
LATE_SHARE: Final = 0.5
"""Of the writes that are sent while etcd is cut off or the network slow: they come late, any time until LATEST_NS. The others are lost, or
come in time."""
RESEND_NS: Final = S // 5
LATEST_NS: Final = 6 * S
T = TypeVar("T")


class ModelCatalog(Catalog):
    """Of one partition, of one process. Its threads: one follows, one keeps the lease, one commits; the first partition's tells besides
    that this master lives, and looks who does."""

    scheme: ClassVar[str] = "etcd"

    def __init__(self, etcd: Etcd, *, is_shared: bool = False) -> None:
        """`is_shared`: several masters share partitions out, of which this is the first one's catalog."""
        self._etcd = etcd
        self._is_shared = is_shared
        self._living: frozenset[str] = frozenset()
        self._address = ""
        """This master's."""
        self._network, self._world = etcd.network, etcd.network.world
        self._process = self._world.here
        self._queue: list[tuple[Sequence[Change], Done, int]] = []
        self._is_writing = False
        """Writes that left the queue are in flight to etcd."""
        self._idle: dict[str, tuple[Thread, int]] = {}
        """Threads that wait for something to do."""
        self._epoch = 0
        """Of this master's ownership, 0: it has none."""
        self._fence: int | None = 0
        """Of its writes; None: one of them may be on its way still, and the fence has to be moved before another one is sent."""
        self._lease_until_ns = 0
        self._is_open = False
        self._is_closed = False
        self._told_deposed: KVStoreError | None = None
        self._given_up = 0
        """The epoch of the ownership that was given up last."""
        self._trouble = ""

    # --- the interface ---

    def open(self, *, deadline_s: float) -> None:
        until_ns = self._world.now_ns + int(deadline_s * S)
        while True:
            try:
                self._ask(lambda: None)
                break
            except CatalogUnavailable:
                if self._world.now_ns >= until_ns:
                    raise
        self._is_open = True
        self._process.spawn(self._commit, "catalog-commit")

    @property
    def identity(self) -> str:
        return self._etcd.identity

    def follow(self, me: Candidate, follower: Follower) -> None:
        self._etcd.watchers.append(self._changed)
        self._process.spawn(lambda: self._follow(me, follower), "catalog-follow")
        self._process.spawn(self._keep_lease, "catalog-lease")
        if self._is_shared:
            self._address = me.address
            self._process.spawn(self._live, "catalog-members")

    @property
    def live_masters(self) -> frozenset[str]:
        return self._living

    def give_up(self) -> None:
        if self._epoch:
            self._given_up = self._epoch
            self._end(self._epoch, StaleEpoch("it is given up for another master"))

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        check_changes(changes)
        if self._is_closed:
            done(Closed("the catalog is closed"))
        elif not self._is_open:
            done(StaleEpoch("this master does not own the catalog"))
        else:
            self._queue.append((changes, done, self._epoch))
            self._rouse("commit")

    @property
    def has_written_all(self) -> bool:
        """Of what was to be committed nothing is on its way still."""
        return not self._queue and not self._is_writing

    @property
    def health(self) -> str:
        return self._trouble or "ok"

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        epoch, queue = self._epoch, self._queue
        self._epoch, self._queue = 0, []
        if self._is_shared and not self._is_cut():
            self._etcd.shared.masters.pop(self._address, None)
        if epoch and not self._is_cut():
            for changes, done, of in queue:
                if of == epoch and self._etcd.owner is not None and self._etcd.owner.epoch == epoch:
                    self._etcd.write(epoch, self._etcd.fence, changes)
                    done(None)
                else:
                    done(Closed("the catalog is closed"))
            self._etcd.release(epoch)
        else:
            for _changes, done, _of in queue:
                done(Closed("the catalog is closed"))
        for name in list(self._idle):
            self._rouse(name)

    # --- asking etcd ---

    def _is_cut(self) -> bool:
        here = self._process.host.name
        return self._network._is_cut(here, HOST) or self._network._is_cut(HOST, here)

    def _ask(self, question: Callable[[], T], *, may_be_late: bool = False) -> T:
        """Return the reply. Raises CatalogUnavailable: the result is unknown, and a request that may be late can still be executed."""
        here, world = self._process.host.name, self._world
        answers: list[tuple[bool, Any]] = []
        waiting: list[tuple[Thread, int]] = []

        def serve() -> None:
            self._etcd.expire(world.now_ns)
            try:
                answer: tuple[bool, Any] = True, question()
            except KVStoreError as error:
                answer = False, error
            if not self._network._is_cut(HOST, here):
                self._process.at(world.now_ns + self._network._delay_ns(HOST, here), lambda: arrive(answer))

        def arrive(answer: tuple[bool, Any]) -> None:
            answers.append(answer)
            for thread, token in waiting:
                thread.wake(token, True)

        is_late = may_be_late and world.rng.random() < LATE_SHARE
        if is_late and self._network.loss:
            world.after(world.below(LATEST_NS), serve)
        else:
            self._send(serve, LATEST_NS if is_late else 0)
        world.block(TIMEOUT_NS, lambda *who: waiting.append(who))
        if not answers:
            self._trouble = "etcd does not answer"
            raise CatalogUnavailable(self._trouble)
        self._trouble = ""
        is_done, value = answers[0]
        if not is_done:
            raise value
        return value  # type: ignore[no-any-return]

    def _send(self, serve: Callable[[], None], left_ns: int) -> None:
        """Retry a request over a cut link for `left_ns`. It may arrive after other writes, when its sender has given up."""
        here, world = self._process.host.name, self._world
        if not self._network._is_cut(here, HOST):
            world.after(self._network._delay_ns(here, HOST), serve)
        elif left_ns > 0:
            world.after(RESEND_NS, lambda: self._send(serve, left_ns - RESEND_NS))

    def _rest(self, name: str, timeout_ns: int | None) -> None:
        """Wait for something to do."""

        def begin(thread: Thread, token: int) -> None:
            self._idle[name] = thread, token

        self._world.block(timeout_ns, begin)
        self._idle.pop(name, None)

    def _rouse(self, name: str) -> None:
        idle = self._idle.pop(name, None)
        if idle is not None:
            idle[0].wake(idle[1], True)

    def _changed(self) -> None:
        """etcd's word to a watcher, where it gets through."""
        if self._process.is_alive and not self._network._is_cut(HOST, self._process.host.name):
            self._process.at(self._world.now_ns + self._network._delay_ns(HOST, self._process.host.name), lambda: self._rouse("follow"))

    # --- threads ---

    def _follow(self, me: Candidate, follower: Follower) -> None:
        while not self._is_closed:
            try:
                at, changes, owner = self._ask(lambda: (self._etcd.revision, self._etcd.listing(), self._etcd.owner))
            except CatalogUnavailable:
                continue
            follower.begin()
            follower.take(changes)
            follower.owned_by(owner)
            self._watch(me, follower, at, owner)

    def _watch(self, me: Candidate, follower: Follower, at: int, owner: CatalogOwner | None) -> None:
        """Until this master has been owner and is not any more."""
        while not self._is_closed:
            if self._told_deposed is not None:
                why, self._told_deposed = self._told_deposed, None
                follower.deposed(why)
                self._leave()
                return
            try:
                if self._epoch:
                    self._rest("follow", POLL_NS)
                    continue
                at, changes, now = self._ask(lambda at=at: (self._etcd.revision, self._since(at), self._etcd.owner))  # type: ignore[misc]
                follower.take(changes)
                if now is None and owner is None:
                    wait_s = self.wait_s()
                    if wait_s:
                        self._world.block(int(wait_s * S))
                    sent_ns = self._process.monotonic_ns()
                    epoch = self._ask(lambda: self._etcd.campaign(me, self._world.now_ns))
                    if epoch:
                        at, changes, _ = self._ask(lambda at=at: (self._etcd.revision, self._since(at), None))  # type: ignore[misc]
                        follower.take(changes)
                        self._epoch = self._fence = epoch
                        self._lease_until_ns = sent_ns + LEASE_NS
                        self._rouse("lease")
                        follower.elected(epoch)
                    continue
                if now != owner:
                    owner = now
                    follower.owned_by(owner)
                    continue
                self._rest("follow", POLL_NS)
            except CatalogUnavailable:
                continue

    def _leave(self) -> None:
        """Let others be elected at once if this master resigned. Otherwise, or if etcd is not reached, its lease expires."""
        epoch, self._given_up = self._given_up, 0
        if epoch:
            with suppress(CatalogUnavailable):
                self._ask(lambda: self._etcd.release(epoch))

    def _live(self) -> None:
        """Say that this master lives, and look who does."""
        while not self._is_closed:
            try:
                self._living = self._ask(self._beat)
            except CatalogUnavailable:
                self._living = frozenset()
            self._world.block(LOOK_NS)

    def _beat(self) -> frozenset[str]:
        shared, now_ns = self._etcd.shared, self._world.now_ns
        if not self._is_closed:
            shared.masters[self._address] = now_ns + LEASE_NS
        return shared.living(now_ns)

    def _since(self, revision: int) -> list[Change]:
        log, changes = self._etcd.log, list[Change]()
        first = len(log)
        while first and log[first - 1][0] > revision:
            first -= 1
        for _revision, _epoch, written in log[first:]:
            changes += written
        return changes

    def _keep_lease(self) -> None:
        while not self._is_closed:
            if not self._epoch:
                self._rest("lease", None)
                continue
            epoch, sent_ns = self._epoch, self._process.monotonic_ns()
            if sent_ns >= self._lease_until_ns:
                self._end(epoch, StaleEpoch("the lease is over"))
                continue
            try:
                self._ask(lambda epoch=epoch: self._etcd.keep_alive(epoch, self._world.now_ns))  # type: ignore[misc]
                if self._epoch == epoch:
                    self._lease_until_ns = sent_ns + LEASE_NS
                    self._rest("lease", LEASE_NS // 4)
            except StaleEpoch as error:
                self._end(epoch, error)
            except CatalogUnavailable:
                continue

    def _end(self, epoch: int, why: KVStoreError) -> None:
        if epoch == self._epoch:
            self._epoch = 0
            self._told_deposed = why
            self._rouse("follow")
            self._rouse("commit")

    def _commit(self) -> None:
        while not self._is_closed:
            if not self._queue:
                self._rest("commit", None)
                continue
            epoch = self._queue[0][2]
            group = [batch for batch in self._queue if batch[2] == epoch]
            self._queue = self._queue[len(group) :]
            self._is_writing = True
            error = self._write(epoch, [change for changes, _done, _of in group for change in changes])
            self._is_writing = False
            if self._is_closed:
                error = error or None
            for _changes, done, _of in group:
                done(error)

    def _write(self, epoch: int, changes: Sequence[Change]) -> KVStoreError | None:
        """Until it is durable, or cannot be any more."""
        while epoch and epoch == self._epoch:
            try:
                if self._fence is None:
                    self._fence = self._ask(lambda: self._etcd.move_fence(epoch))
                self._ask(lambda fence=self._fence: self._etcd.write(epoch, fence, changes), may_be_late=True)  # type: ignore[misc]
            except StaleEpoch as error:
                self._end(epoch, error)
            except CatalogUnavailable:
                if self._is_closed:
                    break
                self._fence = None
                self._world.block(20 * MS)
            else:
                return None
        return Closed("the catalog is closed") if self._is_closed else StaleEpoch("this master does not own the catalog")
