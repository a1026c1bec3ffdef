"""Moves pages between SGLang's memory and the store: in place if values are contiguous, else through staging memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.sglang.head_pages import HeadPool
from kvstore.engines.sglang.pages import PlainHostPool
from kvstore.protocol.retention import Retention

AnyPool = PlainHostPool | HeadPool
Finish = Callable[[], list[bool]]
"""Waits for the transfer; returns whether each page was moved."""


class PageMover:
    """Loads and stores pages by jobs. Thread-safe. Raises ValueError if the memory does not match the pages; errors
    of the store are not raised."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def load(self, pool: AnyPool, hashes: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Finish:
        """Start to read pages into the regions at `pointers`. The memory of a missing page may be overwritten."""
        if isinstance(pool, HeadPool) and not pool.is_in_place:
            return partial(self._load_staged, pool, hashes, pool.regions(pointers, sizes, len(hashes)))
        job = self._jobs.load(pool.keys(hashes), pool.page_memory(pointers, sizes, len(hashes)), on_done=_ignore)
        return lambda: whole_pages(pool, _are_loaded(pool, job))

    def store(
        self,
        pool: AnyPool,
        hashes: Sequence[str],
        before: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        retention: Retention | None = None,
    ) -> Finish:
        """Start to store pages from the regions at `pointers`, with a hint. `before`: hash of the page before the first
        one, if any."""
        if not pool.is_writer:
            return lambda: [True] * len(hashes)
        if isinstance(pool, HeadPool) and not pool.is_in_place:
            return partial(self._store_staged, pool, hashes, before, pool.regions(pointers, sizes, len(hashes)), retention)
        job = self._store(pool, hashes, before, pool.page_memory(pointers, sizes, len(hashes)), retention)
        return lambda: whole_pages(pool, _are_stored(job))

    def _store(
        self, pool: AnyPool, hashes: Sequence[str], before: Sequence[str], memory: Sequence[object], retention: Retention | None
    ) -> Job:
        """Store values; each has the same value of the previous page as its parent."""
        each = pool.values_per_page
        keys = pool.keys(hashes)
        above: list[bytes] | list[None] = pool.keys(before) if before else [None] * each
        parents = [*above, *keys][: len(keys)]
        return self._jobs.store(keys, memory, namespace=pool.namespace, parents=parents, retention=retention, on_done=_ignore)

    def _load_staged(self, pool: HeadPool, hashes: Sequence[str], pages: Sequence[Sequence[int]]) -> list[bool]:
        done: list[bool] = []
        for part in _parts(len(hashes), pool.batch_pages):
            rows = pool.rows(len(pages[part]))
            job = self._jobs.load(pool.keys(hashes[part]), list(rows.reshape(-1, pool.value_bytes)), on_done=_ignore)
            loaded = whole_pages(pool, _are_loaded(pool, job))
            for row, page, is_loaded in zip(rows, pages[part], loaded, strict=True):
                if is_loaded:
                    pool.unpack(row, page)
            done += loaded
        return done

    def _store_staged(
        self, pool: HeadPool, hashes: Sequence[str], before: Sequence[str], pages: Sequence[Sequence[int]], retention: Retention | None
    ) -> list[bool]:
        done: list[bool] = []
        for part in _parts(len(hashes), pool.batch_pages):
            rows = pool.rows(len(pages[part]))
            for row, page in zip(rows, pages[part], strict=True):
                pool.pack(page, row)
            job = self._store(pool, hashes[part], before, list(rows.reshape(-1, pool.value_bytes)), retention)
            done += whole_pages(pool, _are_stored(job))
            before = hashes[part][-1:]
        return done


def whole_pages(pool: AnyPool, of_values: Sequence[bool]) -> list[bool]:
    """Return which pages have all of their values."""
    each = pool.values_per_page
    return [all(of_values[start : start + each]) for start in range(0, len(of_values), each)]


def _are_loaded(pool: AnyPool, job: Job) -> list[bool]:
    job.wait()
    return [size == pool.value_bytes for size in job.results]


def _are_stored(job: Job) -> list[bool]:
    job.wait()
    return job.succeeded


def _parts(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _ignore(job: Job) -> None:
    """Keeps the jobs from queueing the job for `finished`: the submitter waits for it."""
