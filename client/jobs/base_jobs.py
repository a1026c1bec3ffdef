"""What jobs over either kind of client have in common: how they are submitted, and told of."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from kvstore.client.core.arguments import check_list, check_seconds
from kvstore.client.core.forks import Process
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.client_calls import sizes_of
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import BaseJob, Kind, OnDone
from kvstore.client.jobs.stats import JobStats
from kvstore.protocol.errors import Forked

J = TypeVar("J", bound=BaseJob)


class AnyCrew(Protocol):
    """Those who carry jobs out."""

    def submit(self, job: BaseJob) -> None: ...

    def has(self, request: Hashable) -> bool: ...

    def take_finished(self) -> list[BaseJob]: ...

    def stats(self) -> JobStats: ...


class AnyJobs(Generic[J]):
    """See `Jobs` and `AsyncJobs`."""

    _kind_of_job: ClassVar[type[BaseJob]]

    def __init__(self, crew: AnyCrew, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        self.settings = settings
        self._carriers = crew
        self._clock_ns = clock_ns
        self._process = Process.number
        self._default_s = {
            Kind.LOOKUP: settings.lookup_deadline_s,
            Kind.PREFIX: settings.lookup_deadline_s,
            Kind.LOAD: settings.load_deadline_s,
            Kind.STORE: settings.store_deadline_s,
        }

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request: Hashable = None,
        hold: Hold | None = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> J:
        """Find out which of the blocks can be read. They stay in the name of `hold`, if it is given: see
        `Client.match_prefix`."""
        job = self._job(Kind.LOOKUP, request, keys, deadline_s, on_done)
        require_hold(hold)
        job.hold = hold
        return self._submit(job)

    def lookup_prefix(
        self,
        keys: Sequence[bytes],
        *,
        request: Hashable = None,
        hold: Hold | None = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> J:
        """Find out how many of the blocks can be read, from the first on without a gap: the job's `leading`. `hold`: see `lookup`."""
        job = self._job(Kind.PREFIX, request, keys, deadline_s, on_done)
        require_hold(hold)
        job.hold = hold
        return self._submit(job)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        *,
        request: Hashable = None,
        deadline_s: float | None = None,
        budget_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> J:
        """Read values into buffers, as `Client.get_each_into`. The content of a buffer is undefined unless its key succeeded. While the
        store cannot be reached, blocks that lie on this host are read, and the others are Unavailable at once. Where `deadline_s` is
        what others have left of `budget_s`, a store that is silent for the last of that does not count as one that cannot be reached."""
        return self._submit(self._load_job(keys, buffers, request, deadline_s, budget_s, on_done))

    def _load_job(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        request: Hashable,
        deadline_s: float | None,
        budget_s: float | None,
        on_done: OnDone | None,
    ) -> J:
        job = self._job(Kind.LOAD, request, keys, deadline_s, on_done, budget_s)
        check_list(buffers, "buffers")
        job.values, job.sizes = buffers, sizes_of(buffers)
        return job

    def store(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        request: Hashable = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> J:
        """Store values, as `Client.put_batch_from`: write-behind. They are not copied, and must not change until the job is over."""
        job = self._job(Kind.STORE, request, keys, deadline_s, on_done)
        check_list(values, "values")
        if parents is not None:
            check_list(parents, "parents")
        job.namespace, job.parents, job.ack = namespace, parents, ack
        job.values, job.sizes = values, sizes_of(values)
        return self._submit(job)

    def poll(self, request: Hashable) -> bool:
        """Are all jobs of the request over? True, too, of one that has none."""
        return not self._carriers.has(request)

    def finished(self) -> list[J]:
        """Those without `on_done` that have ended since the last call, in the order of their ends."""
        return cast(list[J], self._carriers.take_finished()) if self._process == Process.number else []

    def stats(self) -> JobStats:
        """What has been done so far. Asks nobody. Raises Forked."""
        if self._process != Process.number:
            raise forked()
        return self._carriers.stats()

    def _job(
        self,
        kind: Kind,
        request: Hashable,
        keys: Sequence[bytes],
        deadline_s: float | None,
        on_done: OnDone | None = None,
        budget_s: float | None = None,
    ) -> J:
        check_list(keys, "keys")
        for name, seconds in (("deadline_s", deadline_s), ("budget_s", budget_s)):
            check_seconds(seconds, name)
        chosen_s = self._default_s[kind] if deadline_s is None else deadline_s
        deadline_ns = self._clock_ns() + int(chosen_s * 1e9)
        whole_s = chosen_s if budget_s is None else budget_s
        return cast(J, self._kind_of_job(kind, request, keys, deadline_ns=deadline_ns, budget_s=whole_s, on_done=on_done))

    def _submit(self, job: J) -> J:
        if self._process != Process.number:
            job.fail(0, len(job.keys), forked())
            job.end()
        else:
            self._carriers.submit(job)
        return job


def forked() -> Forked:
    return Forked("these jobs are those of the process that this one was forked from: make some here")
