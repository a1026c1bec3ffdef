"""Pages of engines of any TP through a real store: what one has written, by any layout's way, another reads."""

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.sglang.head_pages import by_heads
from kvstore.engines.sglang.page_mover import AnyPool, PageMover
from kvstore.protocol.retention import Retention
from tests.client.embedded import embedded
from tests.engines.put_client import PutClient
from tests.engines.sglang.host_pool import LAYOUTS, HostPool

HEADS = 8
HASHES = [f"{number:064x}" for number in range(4)]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


@pytest.fixture
def client(address: str) -> Iterator[PutClient]:
    with contextlib.closing(PutClient(address)) as client:
        yield client


@pytest.fixture
def mover(client: PutClient) -> Iterator[PageMover]:
    with Jobs(client) as jobs:
        yield PageMover(jobs)


class Rank:
    """A host pool of one rank, with its share of the pages of `whole` if that is given."""

    def __init__(self, layout: str, tp: tuple[int, int], share_tp: int, model: str, whole: HostPool | None = None) -> None:
        each = max(1, HEADS // tp[1])
        self.host = HostPool(layout, each)
        first = tp[0] * HEADS // tp[1] // each * each
        self.heads = slice(first, first + each)
        pool = self.host.describe_pool(tp, model=model)
        self.pool: AnyPool = by_heads(pool, self.host.host_heads(), share_tp, total_heads=lambda: HEADS) if share_tp else pool
        if whole is not None:
            self.host.pages[:] = whole.pages[..., self.heads, :]


def model() -> str:
    return f"model-{next(NUMBERS)}"


@pytest.mark.parametrize("share_tp", [1, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_any_tp_stores_any_tp_loads(mover: PageMover, layout: str, share_tp: int) -> None:
    sizes = [tp for tp in (1, 2, 4, 8, 16) if not share_tp % min(tp, HEADS)]
    for writer_tp, reader_tp in itertools.product(sizes, sizes):
        name, whole = model(), HostPool(layout, HEADS, seed=writer_tp)
        for number in range(writer_tp):
            rank = Rank(layout, (number, writer_tp), share_tp, name, whole)
            assert mover.store(rank.pool, HASHES[:3], [], *rank.host.meta(4, 0, 2))() == [True] * 3
        for number in range(reader_tp):
            rank = Rank(layout, (number, reader_tp), share_tp, name)
            assert mover.load(rank.pool, HASHES, *rank.host.meta(1, 3, 2, 0))() == [True, True, True, False]
            assert np.array_equal(rank.host.pages[:, [1, 3, 2]], whole.pages[:, [4, 0, 2]][..., rank.heads, :])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_in_one_value_are_shared_by_engines_of_equal_tp(mover: PageMover, layout: str) -> None:
    name, whole = model(), HostPool(layout, HEADS, seed=1)
    writer, reader, other = (Rank(layout, tp, 0, name, own) for tp, own in (((1, 2), whole), ((1, 2), None), ((0, 1), None)))
    assert mover.store(writer.pool, HASHES[:2], [], *writer.host.meta(0, 1))() == [True, True]
    assert mover.load(reader.pool, HASHES[:2], *reader.host.meta(3, 4))() == [True, True]
    assert np.array_equal(reader.host.pages[:, 3:], writer.host.pages[:, :2])
    assert mover.load(other.pool, HASHES[:1], *other.host.meta(0))() == [False]


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_a_page_without_one_of_its_values_is_not_loaded(client: PutClient, mover: PageMover, layout: str) -> None:
    name, whole = model(), HostPool(layout, HEADS, seed=1)
    writer, reader = Rank(layout, (0, 1), 4, name, whole), Rank(layout, (0, 1), 4, name)
    assert mover.store(writer.pool, HASHES[:3], [], *writer.host.meta(0, 1, 2))() == [True] * 3
    assert client.remove([writer.pool.keys(HASHES[1:2])[2]])
    assert mover.load(reader.pool, HASHES[:3], *reader.host.meta(0, 1, 2))() == [True, False, True]
    assert np.array_equal(reader.host.pages[:, [0, 2]], whole.pages[:, [0, 2]])


@pytest.mark.parametrize("batch_bytes", [1, 16 << 20])
@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_values_have_that_of_the_page_before_as_their_parent(
    client: PutClient, mover: PageMover, layout: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engines.sglang.head_pages.STAGING_BYTES", batch_bytes)
    rank = Rank(layout, (0, 1), 4, model(), HostPool(layout, HEADS, seed=1))
    mover.store(rank.pool, HASHES[1:], HASHES[:1], *rank.host.meta(0, 1, 2))()
    mover.store(rank.pool, HASHES[:1], [], *rank.host.meta(3))()
    *rest, first = client.puts
    keys, parents = ([key for put in rest for key in put[place]] for place in (0, 1))
    assert keys == rank.pool.keys(HASHES[1:])
    assert parents == [*rank.pool.keys(HASHES[:1]), *keys[:-4]]
    assert first[:2] == (rank.pool.keys(HASHES[:1]), [None] * 4)
    assert len(rest) == (3 if batch_bytes == 1 and layout == "page_first" else 1)


def test_of_ranks_with_equal_heads_one_stores(client: PutClient, mover: PageMover) -> None:
    name, whole = model(), HostPool("page_head", HEADS, seed=1)
    second = Rank("page_head", (1, 16), HEADS, name, whole)
    assert mover.store(second.pool, HASHES[:2], [], *second.host.meta(0, 1))() == [True, True]
    assert not client.puts


def test_memory_of_another_size_is_refused(mover: PageMover) -> None:
    for layout in LAYOUTS:
        rank = Rank(layout, (0, 2), 4, model())
        for move in (mover.load, lambda pool, hashes, *meta: mover.store(pool, hashes, [], *meta)):
            with pytest.raises(ValueError, match="do not match 2 pages"):
                move(rank.pool, HASHES[:2], *rank.host.meta(0))


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_hint_of_a_store_reaches_all_puts(client: PutClient, mover: PageMover, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engines.sglang.head_pages.STAGING_BYTES", 1)
    rank, hint = Rank(layout, (0, 1), 4, model(), HostPool(layout, HEADS, seed=1)), Retention(60)
    assert mover.store(rank.pool, HASHES[:2], [], *rank.host.meta(0, 1), hint)() == [True, True]
    assert set(client.hints) == {hint}
